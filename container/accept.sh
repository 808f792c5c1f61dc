#!/usr/bin/env bash
# `make accept`: where there is a GPU the image's `accept`, whose page lands in docs/results, else the rehearsal of .venv.
# An image that is not on this host is built.
#
#   container/accept.sh [options of `appliance accept`]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly image=flashrl-appliance:gpu

case " $* " in
    *" --cpu "* | *" --list "* | *" --help "*) exec .venv/bin/appliance accept "$@" ;;
    *" -o"*) elsewhere=yes ;;
esac
[[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]] || exec .venv/bin/appliance accept "$@"
if [ -n "${elsewhere:-}" ]; then
    printf 'error: -o: what the image writes there goes with the container\nhint: leave it out: docs/results has it\n' >&2
    exit 2
fi
docker image inspect "$image" >/dev/null 2>&1 || container/build.sh gpu
mkdir -p runs docs/results
exec docker run --rm --gpus all --shm-size 8g --user "$(id -u)" -v "flashrl-cache-$(id -u):/cache" \
    -v "$PWD/runs:/appliance/runs" -v "$PWD/docs/results:/appliance/docs/results" "$image" accept "$@"
