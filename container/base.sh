#!/usr/bin/env bash
# A plain base image for both targets without any image registry: Debian with Python 3.11, from Debian's packages.
#
#   container/base.sh [NAME]     as root, with debootstrap; does nothing where the image is there already
#
# Where a registry answers it is not needed: the Dockerfile names its base by tag and digest.
set -euo pipefail

readonly name=${1:-flashrl-appliance-base:bookworm}
readonly packages=ca-certificates,python3,python3-venv

if docker image inspect "$name" >/dev/null 2>&1; then
    echo "base: $name is there" >&2
    exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase --include="$packages" bookworm "$folder/root" >"$folder/log" 2>&1 || {
    tail -n 20 "$folder/log" >&2
    exit 1
}
rm -rf "$folder/root/var/cache/apt/archives" "$folder/root/var/lib/apt/lists" "$folder/root/var/log"/*.log
mkdir -p "$folder/root/var/cache/apt/archives/partial" "$folder/root/var/lib/apt/lists/partial"
tar -C "$folder/root" -c . | docker import --message "debootstrap bookworm: $packages" - "$name" >/dev/null
echo "base: made $name in $SECONDS s" >&2
