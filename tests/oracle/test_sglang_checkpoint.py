"""The bundled target as stock SGLang loads it on a GPU: which experts are NVFP4, and that the kernels can read them."""

import json
import subprocess
import sys
from pathlib import Path


def test_sglang_loads_the_bundled_target_as_on_a_gpu() -> None:
    program = Path(__file__).with_name("sglang_checkpoint.py")
    done = subprocess.run([sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"sglang_bf16": [0, 5], "our_bf16": [0, 5], "problems": [], "other_experts": []}
