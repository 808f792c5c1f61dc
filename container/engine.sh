#!/usr/bin/env bash
# A Docker engine where none answers: Debian's docker.io, started here. As root; does nothing where one answers.
set -euo pipefail

readonly log=${TMPDIR:-/tmp}/dockerd.log

answers() { docker version --format '{{.Server.Version}}' 2>/dev/null; }

if version=$(answers); then
    echo "engine: $version answers" >&2
    exit
fi
missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
command -v debootstrap >/dev/null || missing+=(debootstrap)
command -v docker-compose >/dev/null || docker compose version >/dev/null 2>&1 || missing+=(docker-compose)
if [ "${#missing[@]}" -gt 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi
if ! answers >/dev/null; then
    nohup dockerd >"$log" 2>&1 </dev/null &
    for _ in {1..60}; do
        answers >/dev/null && break
        sleep 1
    done
fi
version=$(answers) || {
    tail -n 20 "$log" >&2
    echo "error: no Docker engine answers, $log has everything" >&2
    exit 1
}
echo "engine: $version started, its log is $log" >&2
