#!/usr/bin/env bash
# `make test-gpu-lock`: the GPU lock in an environment that is thrown away at the end, and the tests of this folder in
# it. No GPU is needed; 9 GB of disk and a C compiler with binutils are. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly expected=79 # that pass, where all are asked for
readonly place=$PWD/.venv/gpu-lock
readonly python=$place/bin/python uv=$place-tool/bin/uv log=$place.log

for program in gcc nm; do
    command -v "$program" >/dev/null || {
        printf 'error: there is no %s here\nhint: as root: apt-get update && apt-get install -y gcc\n' "$program" >&2
        exit 1
    }
done
trap 'rm -rf "$place" "$place-tool" "$log"' EXIT
rm -rf "$place" "$place-tool"

# uv is the one that made the lock. It takes half of pip's time, and leaves no cache.
version=$(sed -n 's/^readonly uv_version=\([^ ]*\).*/\1/p' requirements/lock.sh)
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$place-tool" "uv==$version"
"$uv" venv --quiet --python "$(readlink -f .venv/bin/python)" "$place"
install() { "$uv" pip install --quiet --python "$python" --no-cache --no-deps "$@"; }
install --require-hashes -r requirements/gpu.txt
sed -n '/^\(pytest\|iniconfig\|pluggy\)==/,/[^\\]$/p' requirements/dev.txt >"$place/pytest.txt"
install --require-hashes -r "$place/pytest.txt"
install --no-build-isolation -e .
printf 'gpu lock: %s installed in %d s\n' "$(du -sh "$place" | cut -f1)" "$SECONDS" >&2

mkdir "$place/home" # for what vLLM, Triton and FlashInfer keep
HOME=$place/home "$python" -m pytest --confcutdir tests/gpu_lock -o pythonpath=". tests tests/quick/plan" -p no:cacheprovider \
    tests/gpu_lock tests/quick/plan/test_plan_shipped.py::test_plan_is_as_kept \
    tests/quick/plan/test_plan_shipped.py::test_verls_own_classes_take_the_plan "$@" | tee "$log"
[ $# -gt 0 ] || grep -qx "gpu lock: $expected tests passed" "$log" || {
    echo "error: $expected tests are expected to pass" >&2
    exit 1
}
# Fields 14 to 17 of a process's stat: its own and its children's processor time, in hundredths of a second.
awk -v s="$SECONDS" '{ printf "gpu-lock: %d s, %d s of processor time\n", s, ($14 + $15 + $16 + $17) / 100 }' /proc/$$/stat
