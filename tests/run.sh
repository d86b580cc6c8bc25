#!/usr/bin/env bash
# Installs what the tests need into .venv-test and runs all checks that need no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

python3 -m venv .venv-test
python=.venv-test/bin/python
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e ".[dev,plot]"

# The compiler that the kernels are tuned for, apart from what torch asks for and from what this machine has.
cuda=.venv-test/cuda/nvidia/cu13
if [ ! -x "$cuda/bin/nvdisasm" ]; then
    mapfile -t wheels < <("$python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["compile"], sep="\n")')
    "$python" -m pip install --quiet --disable-pip-version-check --target .venv-test/cuda "${wheels[@]}"
fi

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
CUDA_HOME="$PWD/$cuda" "$python" -m pytest tests/cpu --numprocesses 2 --dist loadfile  # tests of a file share kernels
echo "Kernels for sm_90a and sm_103a: compiled and inspected. Those for sm_103a have never run."
bash tests/oracle/run.sh
