#!/bin/sh
# pip inside the image's build: into /opt/venv, nothing beside what is named, with the CA bundle where one was given.
# It runs from a mount, so that no pip stays in the image.
set -eu
[ ! -f /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
exec /opt/pip/bin/python -m pip --python /opt/venv/bin/python install --no-deps --no-input --no-warn-script-location \
    --disable-pip-version-check --root-user-action ignore --progress-bar off --cache-dir /var/cache/pip "$@"
