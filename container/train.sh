#!/usr/bin/env bash
# `make RECIPE`: a recipe for a CPU trains in .venv, one for GPUs in the image, which is built when it is not there.
# Preflight comes first: without the GPUs it ends there (exit code 3) and says what is missing.
#
#   container/train.sh RECIPE [options of `appliance train`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

recipe=$1
sets=()
for argument in "${@:2}"; do
    [[ ${previous:-} == --set ]] && sets+=(--set "$argument")
    [[ $argument == --set=* ]] && sets+=("$argument")
    previous=$argument
done

plan=$(.venv/bin/appliance plan "$recipe" --json "${sets[@]}")
device=$(.venv/bin/python -c 'import json, sys; print(json.load(sys.stdin)["plan"]["device"])' <<<"$plan")
if [ "$device" = cpu ]; then
    exec .venv/bin/appliance train "$@"
fi
.venv/bin/appliance train "$@" --in-container --dry-run
docker image inspect flashrl-appliance:gpu >/dev/null 2>&1 || container/build.sh gpu
exec .venv/bin/appliance train "$@" --in-container
