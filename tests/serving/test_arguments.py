"""SGLang's real argument resolution with the flag: what it accepts, and that every refusal reaches the user."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import _device

from sgl_muse_mega.checkpoint import tiny
from sgl_muse_mega.serving import reasons, switches
from sgl_muse_mega.toolchain import Tool, nvcc_release

pytestmark = pytest.mark.usefixtures("plugins")


def arguments(**changes: Any) -> dict[str, Any]:
    return {
        "model_path": str(tiny.target_directory()),
        "device": "cuda",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_nvidia_megakernel": True,
        "attention_backend": "fa3",
    } | changes


DFLASH = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": str(tiny.draft_directory())}


def resolve(**changes: Any) -> Any:
    """Resolved server arguments. Raises what SGLang raises."""
    from sglang.srt.server_args import ServerArgs

    resolved = ServerArgs(**arguments(**changes))
    resolved.resolve_once()
    return resolved


def refusals(**changes: Any) -> list[str]:
    """The list that SGLang prints."""
    with pytest.raises(ValueError, match="cannot run this setup") as caught:
        resolve(**changes)
    return str(caught.value).split("\n  - ")[1:]


@pytest.fixture(scope="module")
def resolved(plugins: None) -> tuple[Any, Any]:
    """Resolved arguments of a server that is accepted, and its model's configuration."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    with pytest.MonkeyPatch.context() as patch:
        _device(patch, "sm_90")
        found = resolve(**DFLASH)
    return resolving_view(found), model_config_of(found).hf_config


class Changed:
    """A view of something with other values here and there."""

    def __init__(self, base: Any, **changes: Any) -> None:
        self.__dict__.update(changes)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        DFLASH,
        {"attention_backend": "triton", "kv_cache_dtype": "bfloat16", "page_size": 64},
        DFLASH | {"speculative_num_draft_tokens": 16, "cuda_graph_bs_decode": [1, 2]},
        {"disable_cuda_graph": True, "quantization": "modelopt_fp4", "moe_runner_backend": "marlin"},
    ],
)
def test_accepted(changes: dict[str, Any]) -> None:
    resolve(**changes)
    assert os.environ[switches.SERVING] == "1"  # the ranks that this process would start keep the global scales


@pytest.mark.usefixtures("hopper")
def test_all_reasons_come_together() -> None:
    found = refusals(
        tp_size=2, kv_cache_dtype="fp8_e5m2", weight_cache_mode="daemon", attention_backend="flashinfer",
        enable_deterministic_inference=False, cuda_graph_bs_decode=[2, 4], enable_memory_saver=True,
    )  # fmt: skip
    for part in (
        "--tp-size is 2 and the plugin",
        "--weight-cache-mode",
        "--ep-size is 1",
        "fp8_e5m2",
        "'flashinfer'",
        "no decode graph",
        "memory release",
    ):
        assert sum(part in reason for reason in found) == 1, (part, found)
    assert switches.SERVING not in os.environ


def test_without_the_flag_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, "sm_80")
    resolve(enable_nvidia_megakernel=False)
    assert switches.SERVING not in os.environ


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa, part in (("sm_80", "not sm_80"), ("sm_100", "not sm_100"), ("sm_103", switches.EXPERIMENTAL_SM103)):
        _device(monkeypatch, isa)
        assert any(part in reason for reason in refusals())
    monkeypatch.setenv(switches.EXPERIMENTAL_SM103, "1")
    assert any("--moe-runner-backend marlin" in reason for reason in refusals())
    # As in the published export, the first and the last layer have BF16 experts.
    assert ["experts of layers [0, 5] are BF16" in reason for reason in refusals(moe_runner_backend="marlin")] == [True]
    monkeypatch.setattr(reasons, "_bf16_layers", lambda _cfg: [])
    resolve(moe_runner_backend="marlin")


def test_layers_with_bf16_experts(tmp_path: Path) -> None:
    def found(path: object) -> list[int]:
        return reasons._bf16_layers(SimpleNamespace(model_path=str(path)))

    assert found(tiny.target_directory()) == [0, 5]
    assert found("meta-models/not-a-folder") == []
    assert found(tmp_path) == []  # no configuration in it


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"ep_size": 2}, "--ep-size is 2"),
        ({"quantization": "awq"}, "--quantization is 'awq'"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "'marlin' packs them"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"enable_paged_experts": True}, "--enable-paged-experts"),
        ({"speculative_algorithm": "EAGLE3"}, "use DFLASH or none"),
        ({"speculative_num_draft_tokens": 17}, "verify 2 to 16 rows"),
        ({"speculative_num_draft_tokens": 1}, "verify 2 to 16 rows"),
        ({"attention_backend": "flashinfer"}, "set --attention-backend"),
        ({"decode_attention_backend": "triton"}, "different attention backends"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype is 'nvfp4'"),
        ({"quantization_param_path": "scales.json"}, "--quantization-param-path"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"disable_hybrid_swa_memory": True}, "--disable-hybrid-swa-memory"),
        ({"tp_size": 4, "ep_size": 4}, switches.EXPERIMENTAL_TP),
        ({"weight_cache_mode": "connect"}, "--weight-cache-mode is 'connect'"),
        ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode is 'overlap'"),
        ({"checkpoint_engine_wait_weights_before_ready": True}, "load them from --model-path"),
        ({"use_ray": True}, "--use-ray"),
        ({"debug_cuda_graph": True}, "--debug-cuda-graph"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"enable_return_aux_hidden_states": True}, "--enable-return-aux-hidden-states"),
        ({"debug_tensor_dump_output_folder": "/tmp/dump"}, "tensor dumps"),
        ({"forward_hooks": [{}]}, "forward hooks"),
        ({"kv_canary": "log"}, "--kv-canary"),
        ({"expert_distribution_recorder_mode": "stat"}, "--expert-distribution-recorder-mode"),
        ({"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full", bs=[2, 4]))}, "[2, 4]"),
    ],
)
def test_every_argument_we_cannot_serve(resolved: tuple[Any, Any], changes: dict[str, Any], part: str) -> None:
    cfg, hf_config = resolved
    found = reasons.config_disable_reasons(Changed(cfg, **changes), hf_config)
    assert len(found) == 1, found
    assert part in found[0]


@pytest.mark.usefixtures("hopper")
def test_a_bf16_checkpoint_is_not_quantised_on_the_way(resolved: tuple[Any, Any], tmp_path: Path) -> None:
    cfg, hf_config = resolved
    bf16 = Changed(hf_config, quantization_config=None)
    quantising = Changed(cfg, quantization="modelopt_fp4", model_path=str(tmp_path))
    assert ["would quantise" in r for r in reasons.config_disable_reasons(quantising, bf16)] == [True]
    assert reasons.config_disable_reasons(Changed(quantising, quantization=None), bf16) == []
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert reasons.config_disable_reasons(quantising, bf16) == []


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"head_dim": 128}, "head_dim is 128"),
        ({"hidden_size": 200}, "hidden_size 200 is no multiple of 64"),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types"),
        ({"num_shared_experts": 1}, "num_shared_experts"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ],
)
def test_models_we_cannot_serve(resolved: tuple[Any, Any], changes: dict[str, Any], part: str) -> None:
    cfg, hf_config = resolved
    other = Changed(hf_config, text_config=Changed(hf_config.text_config, **changes))
    found = reasons.config_disable_reasons(cfg, other)
    assert len(found) == 1, found
    assert part in found[0]


@pytest.mark.usefixtures("hopper")
def test_several_gpus(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, hf_config = resolved
    monkeypatch.setenv(switches.EXPERIMENTAL_TP, "1")

    def found(ranks: int, **changes: Any) -> list[str]:
        changed = Changed(cfg, tp_size=ranks, ep_size=ranks, **changes)
        return reasons.config_disable_reasons(changed, hf_config)

    assert [found(ranks) for ranks in (1, 2, 4, 8)] == [[]] * 4
    assert ["3 ranks: num_attention_heads = 8" in r for r in found(3)] == [True]
    assert ["--enable-layernorm-sp" in r for r in found(2, enable_layernorm_sp=True)] == [True]
    monkeypatch.setenv(switches.STEP, "full")
    assert found(2, speculative_draft_kv_cache_dtype="bfloat16") == []
    monkeypatch.delenv(switches.STEP)
    resolve(tp_size=2, ep_size=2)
    with pytest.raises(ValueError, match="cannot run this setup"):
        resolve(tp_size=2, ep_size=1)


@pytest.mark.usefixtures("hopper")
def test_trees_and_widths(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cfg, hf_config = resolved
    served = Changed(cfg, speculative_draft_kv_cache_dtype="bfloat16")

    def found(**changes: Any) -> list[str]:
        return reasons.config_disable_reasons(Changed(served, **changes), hf_config)

    monkeypatch.setenv(switches.TREE, "yes")
    monkeypatch.setenv(switches.WIDTH, "8")
    assert [part in r for part, r in zip(("set it to 0 or 1", "set it to auto"), found(), strict=True)] == [True] * 2
    monkeypatch.setenv(switches.TREE, "1")
    monkeypatch.setenv(switches.WIDTH, "auto")
    assert ["set SGLANG_MUSE_MEGA_STEP=full, or unset" in reason for reason in found()] == [True]
    monkeypatch.setenv(switches.STEP, "full")
    assert found() == []
    monkeypatch.setenv(switches.EXPERIMENTAL_TP, "1")
    assert ["run on one GPU" in reason for reason in found(tp_size=2, ep_size=2)] == [True]
    monkeypatch.setenv(switches.COST_TABLE, str(tmp_path / "missing.json"))
    assert ["missing.json" in reason for reason in found()] == [True]


@pytest.mark.usefixtures("hopper")
def test_an_empty_switch_is_no_switch(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *(switches.STEP, switches.TREE, switches.WIDTH, switches.COST_TABLE),
        *(switches.EXPERIMENTAL_SM103, switches.EXPERIMENTAL_TP),
    ):
        monkeypatch.setenv(name, "")
    assert reasons.config_disable_reasons(*resolved) == []
    assert switches.step() == "target"


@pytest.mark.usefixtures("hopper")
def test_environment(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(switches.STEP, "everything")
    assert "set it to target or full" in reasons.config_disable_reasons(*resolved)[0]
    monkeypatch.delenv(switches.STEP)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert "SGLANG_USE_HND_KVCACHE" in reasons.config_disable_reasons(*resolved)[0]
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE")
    monkeypatch.setattr(reasons, "SGLANG_VERSION", "0.5.99")
    assert "install sglang==0.5.99" in reasons.config_disable_reasons(*resolved)[0]


@pytest.mark.usefixtures("hopper")
def test_tools(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that would stop the build after the weights are loaded, before they are."""
    monkeypatch.setattr("sgl_muse_mega.toolchain.find_nvcc", lambda: Tool(None, "CUDA_HOME is set but empty"))
    monkeypatch.setattr(reasons, "_has_bindings", lambda: False)
    monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", "/proc/kernels")
    monkeypatch.setattr("os.access", lambda path, _mode: str(path) != "/proc")
    found = reasons.config_disable_reasons(*resolved)
    assert [
        part in reason for part, reason in zip(("nvcc", "sgl-muse-mega[cuda]", "/proc/kernels"), found, strict=True)
    ]
    assert "CUDA_HOME is set but empty" in found[0]


@pytest.mark.usefixtures("hopper")
def test_an_nvcc_that_does_not_run(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "nvcc"
    broken.write_text("not a program")
    broken.chmod(0o755)
    monkeypatch.setattr("sgl_muse_mega.toolchain.find_nvcc", lambda: Tool(broken, "CUDA_HOME"))
    monkeypatch.setattr("sgl_muse_mega.toolchain.nvcc_release", nvcc_release)
    (reason,) = reasons.config_disable_reasons(*resolved)
    assert f"{broken} (from CUDA_HOME) does not run" in reason


@pytest.mark.usefixtures("hopper")
def test_a_machine_that_cannot_compile(
    resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sgl_muse_mega.toolchain.find_host_compiler", lambda: None)
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "kernels"):
        monkeypatch.setenv("SGL_MUSE_MEGA_CACHE", str(cache))
        found = reasons.config_disable_reasons(*resolved)
        assert [part in reason for part, reason in zip(("install g++", str(cache)), found, strict=True)] == [True] * 2


@pytest.mark.usefixtures("hopper")
def test_the_whole_step_asks_for_more(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, hf_config = resolved
    monkeypatch.setenv(switches.STEP, "full")
    assert ["--speculative-draft-kv-cache-dtype bfloat16" in r for r in reasons.config_disable_reasons(*resolved)] == [
        True
    ]
    accepted = Changed(cfg, speculative_draft_kv_cache_dtype="bfloat16")
    assert reasons.config_disable_reasons(accepted, hf_config) == []
    assert reasons.config_disable_reasons(Changed(cfg, speculative_algorithm=None), hf_config) == []
    for changes, part in (
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"enable_watermark": True}, "--enable-watermark"),
        ({"speculative_draft_model_quantization": "fp8"}, "use a BF16 draft"),
    ):
        found = reasons.config_disable_reasons(Changed(accepted, **changes), hf_config)
        assert len(found) == 1
        assert part in found[0]


@pytest.mark.usefixtures("hopper")
def test_drafts_of_the_whole_step(resolved: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the kernels cannot take of a draft is said before anything loads, and asked only where they would run it."""
    cfg, hf_config = resolved
    written: dict[str, Any] = json.loads((tiny.draft_directory() / "config.json").read_text())

    def found(**changes: Any) -> list[str]:
        nested = {name: value for name, value in changes.items() if name in written["dflash_config"]}
        other = {name: value for name, value in changes.items() if name not in nested}
        content = written | other | {"dflash_config": written["dflash_config"] | nested}
        folder = tmp_path / str(len(list(tmp_path.iterdir())))  # SGLang remembers what it has read
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        served = Changed(cfg, speculative_draft_kv_cache_dtype="bfloat16", speculative_draft_model_path=str(folder))
        return reasons.config_disable_reasons(served, hf_config)

    behind_the_last = {"target_layer_ids": [0, 1, 2, 3, 5]}
    assert found(**behind_the_last) == []  # the target's forward alone
    monkeypatch.setenv(switches.STEP, "full")
    assert found() == []
    for changes, part in (
        (behind_the_last, "target_layer_ids is [0, 1, 2, 3, 5], expected layers before the last"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"vocab_size": 2048}, "vocab_size is 2048 in the draft, expected the target's 1024"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
    ):
        (reason,) = found(**changes)
        assert part in reason
        assert reason.endswith("; use another draft, or SGLANG_MUSE_MEGA_STEP=target")
    missing = Changed(cfg, speculative_draft_kv_cache_dtype="bfloat16", speculative_draft_model_path=str(tmp_path))
    assert reasons.config_disable_reasons(missing, hf_config) == []  # SGLang says so itself


@pytest.mark.usefixtures("hopper")
def test_whitelist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "muse_mega")
    assert "SGLANG_PLUGINS" in refusals()[0]


def test_loading_costs_nothing(fresh_process: "subprocess.Popen[str]") -> None:
    """In a process without the flag the plugin imports neither SGLang's serving code nor ours, and hooks nothing."""
    output, _ = fresh_process.communicate()
    assert fresh_process.returncode == 0, output
