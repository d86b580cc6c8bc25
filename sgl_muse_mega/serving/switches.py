"""Environment variables of the plugin."""

import os

STEP = "SGLANG_MUSE_MEGA_STEP"
STEPS = ("target", "full")
EXPERIMENTAL_SM103 = "SGLANG_MUSE_MEGA_EXPERIMENTAL_SM103"
EXPERIMENTAL_TP = "SGLANG_MUSE_MEGA_EXPERIMENTAL_TP"
TREE = "SGLANG_MUSE_MEGA_TREE"
WIDTH = "SGLANG_MUSE_MEGA_WIDTH"
COST_TABLE = "SGLANG_MUSE_MEGA_COST_TABLE"
SERVING = "SGLANG_MUSE_MEGA_SERVING"
"""Set by the plugin itself for the processes that the server starts."""


def step() -> str:
    """How much of a decode step runs in the plugin: the target's forward ("target"), or all of it under DFLASH."""
    return os.environ.get(STEP) or STEPS[0]


def experimental_sm103() -> bool:
    """Whether a GB300 may run kernels that no GB300 has run yet."""
    return os.environ.get(EXPERIMENTAL_SM103) == "1"


def experimental_tp() -> bool:
    """Whether several GPUs may run a plugin that has only run on one."""
    return os.environ.get(EXPERIMENTAL_TP) == "1"


def tree() -> bool:
    """Whether whole steps verify a tree of as many nodes as the block has rows."""
    return os.environ.get(TREE) == "1"


def automatic_width() -> bool:
    """Whether whole steps choose how many of their rows to verify."""
    return os.environ.get(WIDTH) == "auto"


def cost_table() -> str | None:
    """File with a step's ms by rows, for `automatic_width`."""
    return os.environ.get(COST_TABLE) or None
