"""Comparisons with other projects' implementations; `run.sh` prepares their environment and starts them.

They need SGLang and transformers, and SGLang decides at import time that it runs on a CPU, so they are not collected
together with the other tests.
"""

import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import torch
    import triton_interpreter
    from models import PROMPT, SEED, target_weights, token_ids, write_target
    from report import lines

    from sgl_muse_mega import vector_math
    from sgl_muse_mega.checkpoint.weights import TargetWeights

    vector_math.settle()  # the first sines are often those of transformers or SGLang
    torch.set_num_threads(os.cpu_count() or 1)
    triton_interpreter.install()

    def pytest_report_header() -> str:
        return f"oracle comparisons: ORACLE_SEED={SEED}"

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.oracle)

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("largest measured differences")
        for line in lines():
            terminalreporter.write_line(line)

    @pytest.fixture(scope="session")
    def weights() -> TargetWeights:
        return target_weights()

    @pytest.fixture(scope="session")
    def checkpoint(weights: TargetWeights, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The random target as a folder that both implementations load."""
        directory = tmp_path_factory.mktemp("target") / "checkpoint"
        write_target(directory, weights)
        return directory

    @pytest.fixture(scope="session")
    def sglang_runner(checkpoint: Path) -> Any:
        import sglang_target

        return sglang_target.load(checkpoint)

    @pytest.fixture(scope="session")
    def prompt() -> torch.Tensor:
        return token_ids(PROMPT, SEED + 1)

    @pytest.fixture(scope="session")
    def float32_run(checkpoint: Path, prompt: torch.Tensor) -> Any:
        import transformers_target

        return transformers_target.run(transformers_target.load(checkpoint, torch.float32), prompt)

    @pytest.fixture(scope="session")
    def float64_run(checkpoint: Path, prompt: torch.Tensor) -> Any:
        import transformers_target

        return transformers_target.run(transformers_target.load(checkpoint, torch.float64), prompt)
