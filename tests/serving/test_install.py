"""SGLang's own installation of the built kernels in a rank, on a CPU: what it logs, and what it refuses."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_forward import IDS, PROMPT, Immediate, Sequence

from sgl_muse_mega.serving import hooks

pytestmark = pytest.mark.usefixtures("plugins", "hopper")


@pytest.fixture
def install(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls SGLang's installer as its model runner does; only the GPU's own answers are replaced."""
    from sglang.srt.kernel_plugins.nvidia import binding

    from sgl_muse_mega.serving import spec

    class Machine(Immediate):
        def __init__(self, **_: Any) -> None:
            super().__init__(sms=3)

    monkeypatch.setattr(binding, "megakernel_enabled", lambda: True)
    monkeypatch.setattr(spec, "CudaMachine", Machine)
    monkeypatch.setattr(spec, "Monitor", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tails: list[Any] = []

    def call() -> list[Any]:
        config = runner.model_config.hf_config
        binding.install_megakernel(model=runner.model, hf_config=config, capture_tail_hooks=tails, is_draft=False)
        return tails

    yield call
    for name in ("forward", "_megakernel", "_derived_weight_cache_error"):
        runner.model.__dict__.pop(name, None)
    hooks.unwrap(hooks.FORWARD)


def test_the_active_line_and_a_step(runner: Any, install: Any, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.kernel_plugins.nvidia.binding import built_megakernel

    with caplog.at_level(logging.INFO):
        assert install() == []  # the runner has no decode graphs
    assert (
        "NVIDIA megakernel: active (sgl-muse-mega: 3 layers (0 with NVFP4 experts), one request of 1 row" in caplog.text
    )
    assert "step=target; widths [1]; tolerance numerics; built in" in caplog.text
    assert "beyond SGLang's weights" in caplog.text
    built = built_megakernel(runner.model)
    with caplog.at_level(logging.INFO):
        Sequence.prefill(runner, IDS[:PROMPT])
    assert built.coverage.sglang == {"extend steps": 1}
    assert "Muse megakernel: extend steps: SGLang's own forward runs these steps" in caplog.text


def test_a_model_that_cannot_be_read(runner: Any, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = runner.model.model.language_model.norm.weight
    monkeypatch.setattr(weight, "data", weight.data.float())
    with pytest.raises(ValueError, match=r"cannot run this setup:\n  - rank 0: final_norm is torch\.float32"):
        install()
    assert "forward" not in runner.model.__dict__


def test_a_hook_whose_target_changed(runner: Any, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.forward
    monkeypatch.setattr(ModelRunner, "forward", lambda self, forward_batch, new: original(self, forward_batch))
    with pytest.raises(ValueError, match=r"ModelRunner\.forward takes \(self, forward_batch, new\), not .*0\.5\.23"):
        install()


def test_build_errors_are_one_sentence(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_muse_mega.errors import UserError
    from sgl_muse_mega.serving import spec

    def fail(**_: Any) -> None:
        raise UserError("The kernel cache /x cannot be written (Read-only file system); set SGL_MUSE_MEGA_CACHE.")

    monkeypatch.setattr(spec, "CudaMachine", fail)
    with pytest.raises(UserError, match="Read-only file system"):
        install()
