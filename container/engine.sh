#!/usr/bin/env bash
# A Docker engine where none answers: Debian's docker.io, started here, with what the container tests use. As root.
#
#   container/engine.sh         start one; one that answers is used as it is
#   container/engine.sh stop    end the one that this script started, and nothing else
set -euo pipefail

readonly folder=/run/flashrl-appliance # root's: nobody else can put another process's number or a link there
readonly log=$folder/dockerd.log started=$folder/dockerd.pid
readonly running=/var/run/docker # dockerd's own .pid, and its containerd's: while a process has the number, no other starts
readonly ends_within_s=60

answers() { docker version --format '{{.Server.Version}}' 2>/dev/null; }

install_missing() {
    local missing=()
    answers >/dev/null || command -v dockerd >/dev/null || missing+=(docker.io)
    command -v debootstrap >/dev/null || missing+=(debootstrap)
    command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || missing+=(docker-compose)
    [ "${#missing[@]}" -gt 0 ] || return 0
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

forget_crashed() { # their numbers stay taken until somebody has waited for them
    local file
    for file in "$running.pid" "$running/containerd/containerd.pid"; do
        for _ in {1..50}; do
            [ -f "$file" ] || break
            grep -qs '^State:[[:space:]][^ZX]' "/proc/$(<"$file")/status" || rm -f "$file"
            sleep 0.1
        done
    done
}

start() {
    local version
    answers >/dev/null || rm -f "$started" # of an earlier one: whatever has its number now is not ours
    install_missing
    if version=$(answers); then
        echo "engine: $version answers" >&2
        return
    fi
    forget_crashed
    mkdir -p "$folder"
    nohup dockerd >"$log" 2>&1 </dev/null &
    echo $! >"$started"
    for _ in {1..60}; do
        answers >/dev/null && break
        sleep 1
    done
    version=$(answers) || {
        tail -n 20 "$log" >&2
        echo "error: no Docker engine answers, $log has everything" >&2
        exit 1
    }
    echo "engine: $version started, its log is $log" >&2
}

stop() {
    local engine name
    [ -f "$started" ] || return 0
    engine=$(<"$started")
    rm "$started"
    name=$(cat "/proc/$engine/comm" 2>/dev/null) || return 0
    [ "$name" = dockerd ] || return 0 # it ended, and its number is another's
    kill "$engine" 2>/dev/null || return 0
    timeout "$ends_within_s" tail -s 0.1 --pid="$engine" -f /dev/null || {
        echo "error: dockerd, process $engine, did not end within $ends_within_s s; its log is $log" >&2
        exit 1
    }
}

case ${1:-start} in
    start) start ;;
    stop) stop ;;
    *) echo "error: $0 $1: start or stop" >&2 && exit 2 ;;
esac
