"""One thread makes a process's first call of MKL's vector functions."""

import subprocess
import sys

import pytest

READ = """
import ctypes, glob, os, sys
import torch
library = ctypes.CDLL(glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))[0])
detect = ctypes.cast(library.mkl_vml_serv_cpu_detect, ctypes.c_void_p).value
code = ctypes.string_at(detect, 6)
assert code[:2] == bytes((0x8B, 0x05))  # mov eax, [rip + distance]: the kind of processor, -1 before it is known
kind = ctypes.c_int.from_address(detect + 6 + int.from_bytes(code[2:], "little", signed=True))
torch.set_num_threads(1)
exec(sys.argv[1])
before = kind.value
torch.ones(4096).cos()
print(before, kind.value)
"""


def kinds(first: str) -> tuple[int, int]:
    """MKL's kind of processor in a new process, after the code `first` and after a cosine."""
    run = subprocess.run([sys.executable, "-c", READ, first], capture_output=True, text=True, check=False)
    if "mkl_vml_serv_cpu_detect" in run.stderr or "AssertionError" in run.stderr or "IndexError" in run.stderr:
        pytest.skip("this PyTorch has another MKL, or none")
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    return before, after


def test_reference_does_not_leave_the_first_call_to_several_threads() -> None:
    before, after = kinds("")
    assert before == -1
    assert after >= 0
    assert kinds("import sgl_muse_mega.reference.rope") == (after, after)
