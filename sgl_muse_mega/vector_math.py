"""PyTorch's first sine on a CPU."""

import torch


def settle() -> None:
    """Lets one thread alone make a process's first call of MKL's vector functions, before several make it at once.

    Through them PyTorch computes sqrt, sin, cos, tan, log, tanh and others of contiguous float32 and float64 tensors on
    x86, in all its threads from 2048 elements on. The first call finds out the kind of processor and stores it twice,
    raw and translated. A thread that reads in between runs another kernel: on a CPU with AVX-512 the fast AVX2 one, for
    its whole share of that one call, whose sines are off by up to 1.5e-4 (MKL 2024.2 in torch 2.13;
    https://github.com/pytorch/pytorch/issues/188792).
    """
    torch.ones(1, device="cpu").cos()
