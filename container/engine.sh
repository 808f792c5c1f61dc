#!/usr/bin/env bash
# A Docker engine where none answers: Debian's docker.io, started here, with what the container tests use. As root.
#
#   container/engine.sh         start one; one that answers is used as it is
#   container/engine.sh stop    end the one that this script started, and nothing else
set -euo pipefail

readonly log=${TMPDIR:-/tmp}/dockerd.log
readonly started=${TMPDIR:-/tmp}/dockerd-of-the-appliance.pid

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

start() {
    local version
    install_missing
    if version=$(answers); then
        echo "engine: $version answers" >&2
        return
    fi
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
    local engine
    [ -f "$started" ] || return 0
    engine=$(<"$started")
    rm "$started"
    kill "$engine" 2>/dev/null || return 0
    tail --pid="$engine" -f /dev/null
}

case ${1:-start} in
    start) start ;;
    stop) stop ;;
    *) echo "error: $0 $1: start or stop" >&2 && exit 2 ;;
esac
