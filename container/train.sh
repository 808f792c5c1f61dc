#!/usr/bin/env bash
# `make RECIPE`: a recipe for a CPU trains in .venv, one for GPUs in the image. Where that is not on this host it is built,
# or pulled where `--image` names another. Preflight comes first: without the GPUs it ends there (exit code 3) and says
# what is missing.
#
#   container/train.sh RECIPE [options of `appliance train`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=$1
sets=() image=
for argument in "${@:2}"; do
    case ${previous:-} in
        --set) sets+=(--set "$argument") ;;
        --image) image=$argument ;;
    esac
    case $argument in
        --set=*) sets+=("$argument") ;;
        --image=*) image=${argument#--image=} ;;
    esac
    previous=$argument
done

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

plan=$(.venv/bin/appliance plan "$recipe" --json "${sets[@]}")
device=$(.venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["plan"]["cluster"]["device"])' <<<"$plan")
if [ "$device" = cpu ]; then
    exec .venv/bin/appliance train "$@"
fi
.venv/bin/appliance train "$@" --in-container --dry-run >/dev/null  # its plan; what is missing is said on stderr
if [ -n "$image" ]; then
    is_here "$image" || docker pull "$image" >&2
else
    is_here flashrl-appliance:gpu || container/build.sh gpu
fi
exec .venv/bin/appliance train "$@" --in-container
