#!/usr/bin/env bash
# `make test-plugin`: the plugin on every vLLM that it serves. Each version's CPU build is installed before .venv's
# packages, in a folder that goes again: half a GB, and the network's time for 120 MB.
#
#   versions.sh                        all versions, and how much later an engine starts: what a release needs
#   versions.sh 0.29 0.31              these
#   versions.sh 0.29 -k every_fault    what is no version goes to pytest, and no start is measured then
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly tests=tests/engine/flashrl
readonly main=0.31 # the main stack's, in .venv
place=$(mktemp -d -t test-plugin.XXXXXX)
trap 'rm -rf "$place"' EXIT

pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$place/$1" "${@:2}"
}

install() { # version
    [ -f "requirements/vllm-$1.txt" ] || {
        echo "error: $1: no version that the plugin serves; $main and requirements/vllm-*.txt are" >&2
        exit 1
    }
    pip_install "$1" --require-hashes --requirement "requirements/vllm-$1.txt"
    cp -r requirements/vllm-name "$place/name"
    sed -i "s/$main\.0/$1.0/g" "$place/name/pyproject.toml"
    pip_install "$1" --no-index --no-build-isolation "$place/name"
    rm -r "$place/name"
}

test_version() { # version, arguments of pytest
    local start=$SECONDS found
    [ "$1" = "$main" ] || install "$1"
    export PYTHONPATH=$place/$1
    found=$(.venv/bin/python -c 'from importlib.metadata import version; print(version("vllm"))')
    [ "$found" = "$1.0+cpu" ] || {
        echo "error: vllm $found is found in the place of $1" >&2
        exit 1
    }
    printf 'plugin on vLLM %s: installed in %d s\n' "$found" $((SECONDS - start)) >&2
    local unlisted=$tests/test_flashrl_models.py::test_an_update_ends_in_the_engine_of_the_new_weights
    # `long` in the expression lets tests run that have this marker, and other runs leave out.
    .venv/bin/python -m pytest -m "not e2e and (long or not long)" tests/quick/flashrl/test_flashrl_versions.py $tests/test_flashrl_ways_in.py \
        $tests/test_flashrl_first_load.py $tests/test_flashrl_later_updates.py $tests/test_flashrl_refusals.py \
        $tests/test_flashrl_weight_digests.py $tests/test_flashrl_weight_versions.py $tests/test_flashrl_toolkits.py \
        $tests/test_flashrl_experts.py $tests/test_flashrl_routers.py "$unlisted"\[{gemma3_text,phi3}\] \
        "$tests/test_flashrl_arguments.py::test_a_transfer_into_the_kernels_tensors_is_refused" \
        "$tests/test_flashrl_arguments.py::test_what_vllm_takes_for_fp8_on_a_cpu_with_amx_is_known_and_never_proven" \
        $tests/test_flashrl_serve.py $tests/test_flashrl_installed.py tests/engine/test_engine_sampling_masks.py "${@:2}"
    [ $# -gt 1 ] || .venv/bin/python -m benchmarks.plugin_start --turns 5
    rm -rf "${place:?}/$1"
    printf 'plugin on vLLM %s: %d s\n' "$found" $((SECONDS - start)) >&2
}

versions=()
while [[ ${1:-} =~ ^[0-9]+\.[0-9]+$ ]]; do
    versions+=("$1")
    shift
done
if [ ${#versions[@]} -eq 0 ]; then
    mapfile -t versions < <(printf '%s\n' requirements/vllm-*.txt | sed 's/.*vllm-\(.*\)\.txt/\1/')
    versions+=("$main")
fi
for version in "${versions[@]}"; do
    test_version "$version" "$@"
done
# Fields 14 to 17 of a process's stat: its own and its children's processor time, in hundredths of a second.
awk -v s="$SECONDS" '{ printf "plugin: %d s, %d s of processor time\n", s, ($14 + $15 + $16 + $17) / 100 }' /proc/$$/stat
