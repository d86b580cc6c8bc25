#!/usr/bin/env bash
# Compares this package with SGLang and transformers on a CPU, and runs the plugin's tests: run.sh [DIR] [pytest arguments]
# DIR (default .venv-oracle) receives a virtual environment on the first run: Python 3.11 or later, about 2 GB.
set -euo pipefail
cd "$(dirname "$0")/../.."
directory=${1:-.venv-oracle}
shift || true

if [ ! -e "$directory/complete" ]; then
    "${PYTHON:-python3}" -m venv "$directory"
    pip=("$directory/bin/pip" install --quiet --disable-pip-version-check)
    # The CPU build of torch, from the configured index if it has one, from PyTorch's otherwise.
    "${pip[@]}" torch==2.13.0+cpu 2>/dev/null ||
        "${pip[@]}" --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
    "${pip[@]}" -r tests/oracle/requirements.txt
    # Their own requirements name CUDA packages and another transformers.
    "${pip[@]}" --no-deps sglang==0.5.23 compressed-tensors==0.20.1 xgrammar==0.2.7
    touch "$directory/complete"
fi

# SGLang: CPU code paths, plain PyTorch instead of compiled functions, Triton kernels in Triton's interpreter.
export SGLANG_USE_CPU_ENGINE=1 TORCH_COMPILE_DISABLE=1 TRITON_INTERPRET=1
export PYTHONPATH=$PWD:$PWD/tests/oracle:$PWD/tests/oracle/stubs
"$directory/bin/python" -m pytest tests/oracle -p no:cacheprovider "$@"
exec "$directory/bin/python" -m pytest tests/serving -p no:cacheprovider  # the plugin; its own process, SGLang has one model
