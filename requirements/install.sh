#!/usr/bin/env bash
# Fill a virtual environment with the tested set and Slipstream: install.sh ACCELERATOR VENV [PYTHON]
# Slipstream is the wheel beside this script if there is one (`make wheel` puts them together), else this checkout.
# With sglang-cpu or sglang-gpu it fills the environment of SGLang's server instead.
# A finished install leaves VENV/.installed-ACCELERATOR; whatever lacks it, or was made for the other kind of machine, is
# made anew, so that an interrupted install cannot leave half a package behind.
set -euo pipefail

accelerator=$1 venv=$2 python=${3:-}
here=$(cd "$(dirname "$0")" && pwd)
lock=$here/$accelerator.lock
stamp=$venv/.installed-$accelerator

say() { echo "setup: $*" >&2; }

fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ ! -f "$lock" ]; then
    say "ACCELERATOR=$accelerator is not known; it must be cpu or gpu"
    exit 1
fi
if [ -z "$python" ]; then
    for candidate in python3 python3.11 python3.12 python3.13; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
python=${python:-python3}
if ! fits "$python"; then
    found=$("$python" --version 2>/dev/null || echo "not to be found")
    say "Python 3.11 or later is needed and $python is $found; install one and name it: make PYTHON=python3.11 ..., or install.sh $accelerator $venv python3.11"
    exit 1
fi

if [ ! -f "$stamp" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"

export PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { "$venv/bin/python" -m pip --quiet --quiet "$@"; }

# The CPU build of torch is on no ordinary index; where pip's own settings do not lead to it, PyTorch's index has it, and
# the CPU build of torchvision with it.
torch=$(grep '^torch==' "$lock")
say "installing $torch"
if ! pip install --no-deps "$torch"; then
    if [[ "$accelerator" != *cpu ]]; then
        exit 1
    fi
    say "pip finds no $torch; trying PyTorch's own index of CPU builds"
    pip install --no-deps "$torch" "$(grep '^torchvision==' "$lock")" --index-url https://download.pytorch.org/whl/cpu
fi
say "installing $(grep -c == "$lock") pinned packages of requirements/$accelerator.lock (minutes the first time)"
pip install --no-deps -r "$lock"
if ! "$venv/bin/python" -P -c 'import torchvision' 2>/dev/null; then
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$here/torchvision_without_cuda.py" "$site/"
    echo 'import torchvision_without_cuda' >"$site/torchvision_without_cuda.pth"
    "$venv/bin/python" -P -c 'import torchvision'
fi
if [[ "$accelerator" = sglang-* ]]; then
    # SGLang's server needs none of Slipstream's packages, and on CPUs a stand-in for its kernels.
    if [ "$accelerator" = sglang-cpu ]; then
        cp -r "$here/sgl_kernel" "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/"
    fi
    touch "$stamp"
    say "done; the runs of this folder find it, others by rollout.engine_python=$(cd "$venv" && pwd)/bin/python"
    exit
fi
wheel=$(find "$here" -maxdepth 1 -name 'slipstream_rl-*.whl')
if [ -n "$wheel" ]; then
    pip install --no-deps "$wheel"
else
    pip install --no-deps --no-build-isolation --editable "$here/.."
fi
"$venv/bin/python" -P -c 'from pipeline.run.versions import check_versions; check_versions()'
touch "$stamp"
say "done; activate it with: . $venv/bin/activate"
