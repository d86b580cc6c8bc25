#!/usr/bin/env bash
# Installs what the tests need into .venv-test and runs all checks that need no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

python3 -m venv .venv-test
python=.venv-test/bin/python
"$python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e ".[dev,plot]"

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" -m pytest tests/cpu --numprocesses 2
bash tests/oracle/run.sh
