#!/usr/bin/env bash
# Put Megatron-Core into an environment that `install.sh` has filled: install_megatron.sh VENV
# The package's metadata asks for Python 3.12, so its wheel is unpacked; it needs only what is there already.
set -euo pipefail

venv=$1
here=$(cd "$(dirname "$0")" && pwd)
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "setup: unpacking $(grep -o '^megatron-core==[0-9.]*' "$here/megatron.lock")" >&2
rm -f "$venv/.installed-megatron"
"$venv/bin/python" -m pip --quiet --quiet --disable-pip-version-check download --no-deps --python-version 3.12 \
    --only-binary=:all: --require-hashes --dest "$folder" --requirement "$here/megatron.lock"
rm -rf "$site"/megatron "$site"/megatron_core-*.dist-info
"$venv/bin/python" -m zipfile -e "$folder"/megatron_core-*.whl "$site"
"$venv/bin/python" -P -W ignore -c 'import megatron.core'
touch "$venv/.installed-megatron"
