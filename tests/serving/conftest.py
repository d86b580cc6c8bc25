"""The plugin under SGLang 0.5.23 itself, on a CPU; `tests/oracle/run.sh` prepares the environment and starts these.

SGLang's own model runner loads a small BF16 model and serves it; the kernels run in the emulator; only the device is
replaced, by its name.
"""

import importlib
import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sentences import Heard

from sgl_muse_mega import vector_math
from sgl_muse_mega.toolchain import Tool

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "cpu"))  # what both count with
vector_math.settle()  # the first sines are SGLang's

if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
    collect_ignore_glob = ["test_*.py"]


def install_metadata(folder: Path) -> None:
    """Makes the checkout look installed: SGLang finds plugins through their distribution's entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"sgl_muse_mega-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    install_metadata(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="session", autouse=True)
def heard() -> Iterator[Heard]:
    """Listens to what the plugin says in all tests."""
    listening = Heard()
    with pytest.MonkeyPatch.context() as patch:
        listening.listen(patch)
        yield listening


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that asks what was said comes last."""
    items.sort(key=lambda item: item.name == "test_every_refusal_was_tested")


@pytest.fixture(scope="session")
def plugins(metadata: Path) -> None:
    """SGLang's own loader has run in this process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


_LOADING = """
import sys, time
import sglang.srt.plugins
before, start = set(sys.modules), time.process_time()
sglang.srt.plugins.load_plugins()
seconds = time.process_time() - start
from sglang.kernels.plugin_kernels.nvidia.spec import registered_architectures
from sglang.srt.plugins.hook_registry import HookRegistry
assert registered_architectures() == ["MuseSparkForConditionalGeneration"]
assert not HookRegistry._hooks
new = sorted(set(sys.modules) - before)
assert all(name.startswith(("sgl_muse_mega", "sglang.kernels")) for name in new), new
assert "sgl_muse_mega.serving" not in new
assert seconds < 1, seconds
"""


@pytest.fixture(scope="session", autouse=True)
def fresh_process(metadata: Path) -> Iterator["subprocess.Popen[str]"]:
    """Loads the plugin in a process of its own, beside the other tests: importing SGLang takes its time."""
    path = os.pathsep.join([str(metadata), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", _LOADING],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process
    process.kill()


@pytest.fixture(scope="session", autouse=True)
def sglang_ranks(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str] | None"]:
    """Two ranks of SGLang load the checkpoint, beside the other tests, when their test is among these."""
    if not any("sglang_ranks" in getattr(item, "originalname", "") for item in request.session.items):
        yield None
        return
    checkpoint = request.getfixturevalue("checkpoint")
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("sglang_ranks.py")), str(checkpoint)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield process
    process.kill()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    _device(monkeypatch, "sm_90")


def _device(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    from sglang.srt.kernel_plugins.nvidia import binding

    monkeypatch.setattr(binding, "device_isa", lambda: isa)
    tools = Tool(Path("/usr/local/cuda/bin/nvcc"), "PATH")
    monkeypatch.setattr("sgl_muse_mega.toolchain.find_nvcc", lambda: tools)
    monkeypatch.setattr("sgl_muse_mega.toolchain.nvcc_release", lambda _nvcc: "13.0")
    monkeypatch.setattr("sgl_muse_mega.serving.reasons._has_bindings", lambda: True)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What argument resolution writes into the environment ends with the test."""
    from sgl_muse_mega.serving import switches

    ours = (switches.STEP, switches.SERVING, switches.EXPERIMENTAL_SM103, switches.EXPERIMENTAL_TP)
    for name in (*ours, switches.TREE, switches.WIDTH, switches.COST_TABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def target_config() -> Any:
    from sgl_muse_mega.config import TargetConfig

    return TargetConfig(
        vocab_size=320, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=1024, rms_norm_eps=1e-5, post_norm_eps=1e-8, sliding_window=24,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        layer_rope_theta=(500000.0, 0.0, 500000.0), mlp_layer_types=("sparse",) * 3, moe_hidden_size=64,
        moe_intermediate_size=64, num_local_experts=16, num_experts_per_tok=4, routed_scaling_factor=1.25,
        qk_scale_factor=5.4730064863875, output_multiplier=0.6, final_logit_softcapping=20.0,
        residual_gate_temperature=0.3, eos_token_ids=(2,),
    )  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import models

    from sgl_muse_mega.checkpoint.random_weights import random_target

    directory = tmp_path_factory.mktemp("served") / "target"
    weights = random_target(target_config(), 11)
    calm = [  # a flipped near tie of the router must not change a row beyond recognition
        replace(
            layer,
            post_attention_residual_gate=0.3 * layer.post_attention_residual_gate - 0.8,
            post_feedforward_residual_gate=0.3 * layer.post_feedforward_residual_gate - 0.8,
        )
        for layer in weights.layers
    ]
    models.write_target(directory, replace(weights, layers=tuple(calm)), target_config())
    return directory


@pytest.fixture(scope="session")
def runner(checkpoint: Path) -> Any:
    """SGLang's model runner with the small model, its pools and its attention backend."""
    import sglang_target
    import triton_interpreter

    triton_interpreter.install()
    return sglang_target.load(checkpoint)


def paged_metadata(runner: Any, forward_batch: Any) -> SimpleNamespace:
    """What FlashAttention 3 would prepare for this batch at page size 1, and nothing beyond what is valid."""
    table = runner.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
    mapping = runner.token_to_kv_pool.full_to_swa_index_mapping
    length = int(forward_batch.seq_lens[0])
    full = table.clone()
    full[:, length:] = 2**30
    sliding = full.clone()
    sliding[:, :length] = mapping[table[:, :length].long()].to(sliding.dtype)
    return SimpleNamespace(
        page_table=full, swa_page_table=sliding, swa_out_cache_loc=mapping[forward_batch.out_cache_loc]
    )


def packed_metadata(runner: Any, forward_batch: Any, window: int) -> SimpleNamespace:
    """The same as Triton packs it: all slots of the batch's length, and those of its last `window` positions."""
    import torch

    table = runner.req_to_token_pool.req_to_token[int(forward_batch.req_pool_indices[0])]
    mapping = runner.token_to_kv_pool.full_to_swa_index_mapping
    length = int(forward_batch.seq_lens[0])
    packed = min(length, window)
    full, sliding = torch.full((2, 1024), 2**30)
    full[:length] = table[:length].long()
    sliding[:packed] = mapping[table[length - packed : length].long()]
    return SimpleNamespace(
        kv_indices=full,
        kv_indptr=torch.tensor([0, length], dtype=torch.int32),
        window_kv_indices=sliding,
        window_kv_indptr=torch.tensor([0, packed], dtype=torch.int32),
        swa_out_cache_loc=mapping[forward_batch.out_cache_loc],
    )
