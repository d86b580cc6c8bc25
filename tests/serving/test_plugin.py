"""Registration beside other plugins, SGLang's method signatures, the kept scales, counting and reporting."""

import logging
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_muse_mega import plugin
from sgl_muse_mega.config import TargetConfig
from sgl_muse_mega.megakernel.protocol import RECORD_COMPLETE, RECORD_WORDS
from sgl_muse_mega.serving import coverage, hooks, reasons, scales, switches
from sgl_muse_mega.serving.weights import kernel_layer


def test_names(metadata: Path) -> None:
    found = {entry.name: entry.value for entry in entry_points(group=plugin.GROUP)}
    assert found == dict.fromkeys(plugin.NAMES, "sgl_muse_mega.plugin:register")


def test_spec(plugins: None) -> None:
    from sglang.kernels.plugin_kernels.nvidia.spec import Feature, find_spec

    spec, why = find_spec(architectures=[plugin.ARCHITECTURE], isa="sm_90")
    assert why == ""
    assert spec.features == {Feature.SPECULATIVE_DECODING, Feature.EXPERT_PARALLEL}
    assert spec.max_rows == 16
    assert find_spec(architectures=[plugin.ARCHITECTURE], isa="sm_100")[0] is None


def test_another_plugin_with_our_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.plugin_kernels.nvidia import spec

    monkeypatch.setattr(spec, "_REGISTRY", {plugin.ARCHITECTURE: "other.package:SPEC"})
    with pytest.raises(RuntimeError, match=r"other\.package:SPEC.*SGLANG_PLUGINS"):
        plugin.register.__wrapped__()


def test_another_distribution_with_our_name(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "sgl_nvidia_mega-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-nvidia-mega\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnvidia_megakernel = elsewhere:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        plugin.register.__wrapped__()
    assert "sgl-nvidia-mega also provides the plugin 'nvidia_megakernel'" in caplog.text


def test_signatures_of_sglang() -> None:
    assert list(hooks.problems(hooks.SERVER + hooks.SPECULATION)) == []


def test_a_changed_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch: None)
    monkeypatch.delattr(DFlashWorkerV2, "_make_next_draft_input_decode")
    found = list(hooks.problems(hooks.SERVER + hooks.SPECULATION))
    assert len(found) == 2
    assert "ModelRunner.forward takes (self, batch), not (self, forward_batch" in found[0]
    assert "_make_next_draft_input_decode" in found[1]
    monkeypatch.setattr(reasons, "_speculates", lambda: True)
    monkeypatch.setattr(reasons, "place", lambda: (0, 1))
    assert set(found) <= set(reasons.model_disable_reasons(object(), SimpleNamespace()))


def test_wrapping() -> None:
    class Owner:
        def method(self, x: int) -> int:
            """Kept."""
            return x

    module = SimpleNamespace(Owner=Owner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks.pkgutil, "resolve_name", lambda _path: module.Owner)
        target = hooks.Target("somewhere:Owner.method", ("self", "x"))
        for factor in (2, 3):  # the second replaces the first
            hooks.wrap(target, lambda original, me, x, factor=factor: factor * original(me, x))
        assert Owner().method(5) == 15
        assert Owner.method.__doc__ == "Kept."
        hooks.unwrap(target)
    assert Owner().method(5) == 5


def test_global_scales_outlive_the_repack(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own method, with the registry's hook, on a module whose native tensors it deletes."""
    from sglang.srt.layers.muse_spark.muse_spark_nvfp4_moe import MuseSparkNvFp4FusedMoEMethod as Method
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.__class__(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(Method, "process_weights_after_loading", Method.process_weights_after_loading)
    monkeypatch.setattr(Method.__mro__[1], "process_weights_after_loading", lambda _method, _layer: None)
    scales.register_hook()
    HookRegistry.apply_hooks()
    layer = torch.nn.Module()
    names = [native for _, native in Method._MARLIN_PARAM_ALIASES]
    for name in names:
        shape = {"gate_up_proj_weight_scale_2": (4, 2), "down_proj_weight_scale_2": (4,)}.get(name, (4, 3))
        layer.register_parameter(name, torch.nn.Parameter(torch.rand(shape), requires_grad=False))
    gate_up, down = layer.gate_up_proj_weight_scale_2.clone(), layer.down_proj_weight_scale_2.clone()
    method = object.__new__(Method)
    method._moe_runner_backend = SimpleNamespace(is_marlin=lambda: True)
    method.process_weights_after_loading(layer)
    assert not any(name in layer._parameters for name in names)
    kept = scales.kept(layer)
    assert kept is not None
    assert torch.equal(kept[0], gate_up)
    assert torch.equal(kept[1], down)
    assert not any(name.startswith("muse_mega") for name in layer.state_dict())


def served_layer(**experts: Any) -> Any:
    """A decoder layer of SGLang's names; every tensor is recognisable by its object."""

    def weight() -> SimpleNamespace:
        return SimpleNamespace(weight=torch.rand(2, 2))

    gate = SimpleNamespace(weight=torch.rand(2), e_score_correction_bias=torch.rand(2))
    residual = SimpleNamespace(_alpha=torch.rand(1, 8), _beta=torch.rand(1, 8))
    mlp = SimpleNamespace(
        gate=gate, pre_expert_proj=weight(), pre_expert_norm=weight(), post_expert_proj=weight(), nvfp4_checkpoint=True,
        experts=SimpleNamespace(post_expert_norm=weight(), **experts),
    )  # fmt: skip
    return SimpleNamespace(
        input_layernorm=weight(), self_attn=SimpleNamespace(qkv_proj=weight(), o_proj=weight()), mlp=mlp,
        post_attention_residual_gate=residual, pre_feedforward_layernorm=weight(),
        post_feedforward_layernorm=weight(), post_feedforward_residual_gate=residual,
    )  # fmt: skip


def test_nvfp4_experts_are_read_in_place() -> None:
    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    experts = {name: torch.rand(4, 2) for name in names}
    layer = served_layer(**experts)
    from sgl_muse_mega.errors import UserError

    with pytest.raises(UserError, match="global scales of layer 7's experts were not kept"):
        kernel_layer(layer, 7)
    gate_up, down = torch.rand(4, 2), torch.rand(4)
    setattr(layer.mlp.experts, scales.GATE_UP, gate_up)
    setattr(layer.mlp.experts, scales.DOWN, down)
    made = kernel_layer(layer, 7)
    in_place = (made.gate_up, made.down, made.gate_up_block_scale, made.down_block_scale)
    assert [t.data_ptr() for t in in_place] == [experts[name].data_ptr() for name in names]
    assert torch.equal(made.gate_scale, gate_up[:, 0])
    assert torch.equal(made.up_scale, gate_up[:, 1])
    assert torch.equal(made.down_scale, down)


def test_unreadable_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "_speculates", lambda: False)
    monkeypatch.setattr(reasons, "place", lambda: (0, 1))
    monkeypatch.setattr(reasons, "target_config", lambda _config: TargetConfig.model_construct(vocab_size=8))
    found = reasons.model_disable_reasons(SimpleNamespace(), SimpleNamespace())
    assert len(found) == 1
    assert "other parts than those of SGLang 0.5.23" in found[0]


def test_coverage_counts_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    counts = coverage.Coverage()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            counts.ran("target verify steps")
            counts.declined("extend steps")
        counts.accepted([3, 0])
    assert caplog.text.count("extend steps: SGLang's own forward runs these steps") == 1
    assert counts.summary() == (
        "steps in the kernels: 3 target verify steps; in SGLang's own code: 3 extend steps; "
        "accept length 2.500 over 2 verify steps"
    )


def test_monitor_reports_when_quiet_and_names_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    counts, record = coverage.Coverage(), torch.zeros(RECORD_WORDS, dtype=torch.int64)
    monitor = coverage.Monitor(counts, record)
    start = monitor._changed
    with caplog.at_level(logging.INFO):
        monitor.look(start + 100)
        counts.ran("decode steps")
        monitor.look(start + 101)
        monitor.look(start + 101 + coverage.QUIET_SECONDS / 2)
        assert caplog.text == ""
        for seconds in (200, 300):
            monitor.look(start + seconds)
        assert caplog.text.count("summary: steps in the kernels: 1 decode steps") == 1
        record[1:7] = torch.tensor([0, 5, 0, 8, 7, 3])
        record[7] = RECORD_COMPLETE
        for seconds in (301, 302):
            monitor.look(start + seconds)
    assert caplog.text.count("CTA 5 of launch 3") == 1


def test_a_long_list_of_unreadable_tensors_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_muse_mega.megakernel.random_step import random_weights, tiny_config
    from sgl_muse_mega.serving.weights import SHOWN_PROBLEMS, weight_problems

    config = tiny_config(2, nvfp4=False)
    weights = random_weights(config, 1, torch.device("cpu"))
    assert weight_problems(config, weights) == []
    found = weight_problems(config.model_copy(update={"hidden_size": 192}), weights)
    assert len(found) == SHOWN_PROBLEMS + 1
    assert "instead of" in found[0]
    assert "more tensors" in found[-1]


def test_a_process_that_ends_by_itself_sums_up(caplog: pytest.LogCaptureFixture) -> None:
    counts = coverage.Coverage()
    monitor = coverage.Monitor(counts, torch.zeros(RECORD_WORDS, dtype=torch.int64))
    with caplog.at_level(logging.INFO):
        monitor.close()
        assert caplog.text == ""
        counts.ran("whole steps")
        counts.declined("extend steps")
        for _ in range(2):
            monitor.close()
    assert caplog.text.count("summary: steps in the kernels: 1 whole steps; in SGLang's own code: 1 extend steps") == 1
    counts.rank = 3
    counts.ran("whole steps")
    monitor.close()
    assert caplog.text.count("summary") == 1  # one rank speaks for all


def test_the_summary_is_written_at_exit(metadata: Path) -> None:
    """In a process of its own, whose monitor has had no time to find it quiet."""
    program = """
import logging, time, torch
from sgl_muse_mega.serving.coverage import Coverage, Monitor
logging.basicConfig(level=logging.INFO)
counts = Coverage()
Monitor(counts, torch.zeros(16, dtype=torch.int64)).start()
time.sleep(0.2)
counts.ran("decode steps")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("Muse megakernel summary: steps in the kernels: 1 decode steps") == 1


def test_only_a_process_that_serves_hooks_the_loader(monkeypatch: pytest.MonkeyPatch, metadata: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.__class__(list))
    for value, hooked in (("", []), ("0", []), ("1", [scales.TARGET])):
        monkeypatch.setenv(switches.SERVING, value)
        plugin.register.__wrapped__()
        assert list(HookRegistry._hooks) == hooked
