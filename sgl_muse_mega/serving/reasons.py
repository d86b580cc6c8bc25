"""Why a server cannot run the plugin, as sentences for the person who starts it; all of them at once."""

import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sgl_muse_mega import toolchain
from sgl_muse_mega.config import TargetConfig, check_pair, load_target_config
from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.draft_instance import DraftInstance, TargetEnds
from sgl_muse_mega.megakernel.instance import HOPPER_SMS, MAX_ROWS, Instance, row_cap_of
from sgl_muse_mega.serving import switches, tables
from sgl_muse_mega.serving.model_config import draft_of_arguments, target_config
from sgl_muse_mega.serving.ranks import place
from sgl_muse_mega.speculative.width import read_cost_table

SGLANG_VERSION = "0.5.23"
KV_DTYPES = {"fp8_e4m3": "fp8", "bf16": "bf16", "bfloat16": "bf16"}


def config_disable_reasons(cfg: Any, hf_config: Any) -> list[str]:
    """Everything about the resolved server arguments that the plugin cannot serve ([] when it can).

    Of what SGLang checks itself (features, tp_size, dtype, graph backends) nothing is repeated. When there is no
    reason, the processes that this one starts learn that they will serve the plugin.
    """
    found = [
        reason
        for check in (
            _version,
            _chip,
            _tools,
            _model,
            _ranks,
            _experts,
            _loading,
            _speculation,
            _attention,
            _cache,
            _graphs,
            _outputs,
            _step,
            _draft,
            _rows,
        )
        for reason in check(cfg, hf_config)
    ]
    if not found:
        os.environ[switches.SERVING] = "1"
    return found


def _version(cfg: Any, hf_config: Any) -> Iterator[str]:
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        installed = "of unknown version"
    if installed != SGLANG_VERSION:
        yield f"SGLang is {installed} and the plugin is written for {SGLANG_VERSION}; install sglang=={SGLANG_VERSION}"


def _chip(cfg: Any, hf_config: Any) -> Iterator[str]:
    from sglang.srt.kernel_plugins.nvidia import binding

    if binding.device_isa() == "sm_103" and not switches.experimental_sm103():
        yield (
            "this GPU is a GB300 or B300 (sm_103), where the kernels have never run; set "
            f"{switches.EXPERIMENTAL_SM103}=1 to try them, and check the text against SGLang's own"
        )


def _tools(cfg: Any, hf_config: Any) -> Iterator[str]:
    nvcc = toolchain.find_nvcc()
    if nvcc.path is None:
        yield (
            f"the kernels are compiled at the first start and nvcc was not found ({nvcc.source}); install the CUDA "
            "toolkit 13 or `pip install 'sgl-muse-mega[compile]'`, or set CUDA_HOME"
        )
    elif toolchain.nvcc_release(nvcc.path) is None:
        yield f"{nvcc.path} (from {nvcc.source}) does not run; install the CUDA toolkit 13 again, or set CUDA_HOME"
    elif toolchain.find_host_compiler() is None:
        yield "nvcc needs a C++ compiler and there is none; install g++"
    if not _has_bindings():
        yield "cuda-bindings is not installed, which launches the kernels; run pip install 'sgl-muse-mega[cuda]'"
    folder = toolchain.cache_directory()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        yield f"the kernel cache {folder} cannot be written; set SGL_MUSE_MEGA_CACHE to a folder of yours"


def _has_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def _model(cfg: Any, hf_config: Any) -> Iterator[str]:
    try:
        config = target_config(hf_config)
        check_sizes(config)
    except UserError as error:
        yield _clause(error)


def check_sizes(config: TargetConfig, ranks: int = 1) -> None:
    """Raises UserError when the kernels cannot be built for one of `ranks` ranks of these sizes."""
    Instance.for_config(config, nvfp4=True, fp8_cache=True, row_cap=MAX_ROWS, sms=HOPPER_SMS, ranks=ranks)


def _ranks(cfg: Any, hf_config: Any) -> Iterator[str]:
    ranks = cfg.tp_size
    if ranks == 1:
        return
    if not switches.experimental_tp():
        yield (
            f"--tp-size is {ranks} and the plugin serves one GPU: under SGLang it has never run on several; "
            f"set {switches.EXPERIMENTAL_TP}=1 to try it, and check the text against SGLang's own"
        )
        return
    if switches.tree() or switches.automatic_width():
        yield f"{switches.TREE} and {switches.WIDTH} run on one GPU and --tp-size is {ranks}; unset them"
    if cfg.enable_layernorm_sp:
        yield "--enable-layernorm-sp splits tokens among the GPUs, which the kernels do not; leave it out"
    if next(_model(cfg, hf_config), None) is None:
        try:
            check_sizes(target_config(hf_config), ranks)
        except UserError as error:
            yield f"--tp-size is {ranks}: {_clause(error)}"


def _loading(cfg: Any, hf_config: Any) -> Iterator[str]:
    """The experts' global scales are kept while weights are loaded, and everything is built right behind."""
    if cfg.weight_cache_mode != "off":
        yield f"--weight-cache-mode is {cfg.weight_cache_mode!r}, which hands over repacked weights; leave it out"
    if cfg.startup_weight_load_mode != "serial":
        yield f"--startup-weight-load-mode is {cfg.startup_weight_load_mode!r}; the kernels need weights first: serial"
    if cfg.checkpoint_engine_wait_weights_before_ready:
        yield "--checkpoint-engine-wait-weights-before-ready brings weights too late; load them from --model-path"
    if cfg.use_ray:
        yield "--use-ray starts ranks that do not inherit this process's environment; leave it out"


def _experts(cfg: Any, hf_config: Any) -> Iterator[str]:
    tp_size, ep_size = cfg.tp_size, cfg.ep_size or 1
    if ep_size != tp_size:
        yield f"--ep-size is {ep_size} and --tp-size is {tp_size}; Muse Spark needs them equal"
    if cfg.quantization not in (None, "modelopt_fp4", "modelopt"):
        yield f"--quantization is {cfg.quantization!r}; experts can be BF16 or an NVFP4 export (modelopt_fp4)"
    elif cfg.quantization is not None and not _is_export(cfg, hf_config):
        yield (
            f"--quantization {cfg.quantization} would quantise a BF16 checkpoint while it loads; use an NVFP4 export "
            "or leave the option out"
        )
    if cfg.moe_runner_backend not in ("auto", "marlin"):
        yield f"--moe-runner-backend is {cfg.moe_runner_backend!r}; the kernels read the experts as 'marlin' packs them"
    elif cfg.moe_runner_backend == "auto" and switches.experimental_sm103() and _is_blackwell():
        yield "--moe-runner-backend is 'auto', which is not Marlin on this GPU; add --moe-runner-backend marlin"
    if switches.experimental_sm103() and _is_blackwell() and (layers := _bf16_layers(cfg)):
        yield (
            f"the experts of layers {layers} are BF16, and on this GPU SGLang shuffles such experts into an order that "
            "the kernels do not read; use an export whose experts are all NVFP4, or leave the flag out"
        )
    if (cfg.moe_a2a_backend or "none") != "none":
        yield f"--moe-a2a-backend is {cfg.moe_a2a_backend!r}; leave it out"
    if cfg.enable_paged_experts:
        yield "--enable-paged-experts moves experts out of GPU memory; leave it out"


def _is_blackwell() -> bool:
    from sglang.srt.kernel_plugins.nvidia import binding

    return binding.device_isa() not in (None, "sm_90")


def _bf16_layers(cfg: Any) -> list[int]:
    """Layers whose experts the checkpoint keeps in BF16; [] also where the checkpoint is not a folder yet."""
    folder = Path(str(cfg.model_path))
    if not folder.is_dir():
        return []
    try:
        config = load_target_config(folder)
    except UserError:
        return []  # `_model` says what is wrong with it
    return [layer for layer in range(config.num_hidden_layers) if not config.nvfp4_experts(layer)]


def _is_export(cfg: Any, hf_config: Any) -> bool:
    """Whether the checkpoint says itself that it is quantised."""
    if getattr(hf_config, "quantization_config", None) is not None:
        return True
    folder = Path(str(cfg.model_path))
    return not folder.is_dir() or (folder / "hf_quant_config.json").is_file()


def _speculation(cfg: Any, hf_config: Any) -> Iterator[str]:
    algorithm = cfg.speculative_algorithm
    if algorithm is None:
        return
    if algorithm != "DFLASH":
        yield f"--speculative-algorithm is {algorithm}; use DFLASH or none"
        return
    rows = int(cfg.speculative_num_draft_tokens or 0)
    if not 2 <= rows <= MAX_ROWS:
        yield f"--speculative-num-draft-tokens is {rows}; the kernels verify 2 to {MAX_ROWS} rows of a request"


def _attention(cfg: Any, hf_config: Any) -> Iterator[str]:
    from sglang.srt.arg_groups.model_override_base import attention_backends_of

    prefill, decode = attention_backends_of(cfg)
    used = {"decode": decode}
    if cfg.speculative_algorithm is not None and cfg.speculative_attention_mode == "prefill":
        used = {"verify (prefill's)": prefill}
    for what, backend in used.items():
        if backend not in tables.BACKENDS:
            yield (
                f"the attention backend of {what} is {backend!r}; the kernels take slots from the tables of "
                f"{', '.join(tables.BACKENDS)}: set --attention-backend to one of them"
            )
    if prefill != decode:
        yield (
            f"prefill and decode have different attention backends ({prefill!r}, {decode!r}); set --attention-backend "
            "alone"
        )


def _cache(cfg: Any, hf_config: Any) -> Iterator[str]:
    from sglang.srt.environ import envs

    if cfg.kv_cache_dtype not in KV_DTYPES:
        yield f"--kv-cache-dtype is {cfg.kv_cache_dtype!r}; the kernels read {', '.join(KV_DTYPES)}"
    if cfg.quantization_param_path is not None:
        yield "--quantization-param-path gives the FP8 cache scales; the kernels read caches without scales"
    for option in ("enable_unified_memory", "enable_page_major_kv_layout", "enable_kv_cache_sharding"):
        if getattr(cfg, option):
            yield f"--{option.replace('_', '-')} lays the KV cache out in a way the kernels do not read; leave it out"
    if cfg.disable_hybrid_swa_memory:
        yield "--disable-hybrid-swa-memory keeps sliding layers in the full pool; leave it out"
    if envs.SGLANG_USE_HND_KVCACHE.get():
        yield "SGLANG_USE_HND_KVCACHE is set; the kernels read caches by token, unset it"


def _graphs(cfg: Any, hf_config: Any) -> Iterator[str]:
    decode = cfg.cuda_graph_config.decode
    sizes = decode.bs
    if decode.backend != "disabled" and sizes and 1 not in sizes:
        yield f"no decode graph is captured for one request (sizes {list(sizes)}); add 1 to --cuda-graph-bs-decode"
    if cfg.debug_cuda_graph:
        yield "--debug-cuda-graph runs captured steps eagerly; leave it out"
    if cfg.enable_pdmux:
        yield "--enable-pdmux runs prefill beside decode on part of the GPU; the kernels need all of it"


def _outputs(cfg: Any, hf_config: Any) -> Iterator[str]:
    for option in ("enable_return_hidden_states", "enable_return_aux_hidden_states"):
        if getattr(cfg, option):
            yield f"--{option.replace('_', '-')} asks for hidden states, which the kernels do not keep; leave it out"
    if cfg.debug_tensor_dump_output_folder is not None or cfg.forward_hooks is not None:
        yield "tensor dumps and forward hooks look into modules that the kernels replace; leave them out"
    if cfg.expert_distribution_recorder_mode is not None:
        yield "--expert-distribution-recorder-mode counts routes inside modules that the kernels replace; leave it out"
    if cfg.kv_canary not in (None, "none", "off", False):
        yield "--kv-canary checks writes that the kernels make elsewhere; leave it out"


def _step(cfg: Any, hf_config: Any) -> Iterator[str]:
    step = switches.step()
    if step not in switches.STEPS:
        yield f"{switches.STEP} is {step!r}; set it to {' or '.join(switches.STEPS)}"
    if step != "full" or cfg.speculative_algorithm is None:
        return
    draft_dtype = cfg.speculative_draft_kv_cache_dtype or cfg.kv_cache_dtype
    if draft_dtype not in ("bf16", "bfloat16"):
        yield (
            f"{switches.STEP}=full keeps the draft's cache in bfloat16 and the server's is {draft_dtype}; add "
            "--speculative-draft-kv-cache-dtype bfloat16"
        )
    if cfg.enable_watermark:
        yield f"{switches.STEP}=full chooses tokens without a watermark; leave --enable-watermark out, or use target"
    if cfg.speculative_draft_window_size is not None:
        yield f"{switches.STEP}=full has no use for --speculative-draft-window-size; leave it out"
    if cfg.speculative_draft_model_quantization not in (None, "unquant", "modelopt_fp4"):
        quantization = cfg.speculative_draft_model_quantization
        yield f"{switches.STEP}=full reads a BF16 draft and this one is to be {quantization!r}; use a BF16 draft"


def _draft(cfg: Any, hf_config: Any) -> Iterator[str]:
    """Whether the kernels can be built for the whole step's draft, by its configuration."""
    if switches.step() != "full" or cfg.speculative_algorithm != "DFLASH":
        return
    if next(_model(cfg, hf_config), None) or next(_speculation(cfg, hf_config), None):
        return
    target = target_config(hf_config)
    try:
        draft = draft_of_arguments(cfg, hf_config)
        check_pair(target, draft)
        DraftInstance.for_config(
            draft,
            TargetEnds.of(target),
            row_cap=row_cap_of(int(cfg.speculative_num_draft_tokens)),
            sms=HOPPER_SMS,
            ranks=cfg.tp_size,
        )
    except UserError as error:
        yield f"{_clause(error)}; use another draft, or {switches.STEP}=target"
    except (OSError, ValueError):
        return  # SGLang cannot read it either, and says so


def _rows(cfg: Any, hf_config: Any) -> Iterator[str]:
    """Trees and chosen widths, which whole steps alone have."""
    for name, values in ((switches.TREE, ("0", "1")), (switches.WIDTH, ("auto",))):
        value = os.environ.get(name)
        if value and value not in values:
            yield f"{name} is {value!r}; set it to {' or '.join(values)}, or unset it"
    if (switches.tree() or switches.automatic_width()) and switches.step() != "full":
        yield f"{switches.TREE} and {switches.WIDTH} change whole steps alone; set {switches.STEP}=full, or unset them"
    table = switches.cost_table()
    if table:
        try:
            read_cost_table(Path(table))
        except UserError as error:
            yield f"{switches.COST_TABLE}: {_clause(error)}"


def model_disable_reasons(model: Any, hf_config: Any) -> list[str]:
    """Everything about the loaded model that the kernels cannot read ([] when they can), on each rank."""
    from sgl_muse_mega.serving import hooks
    from sgl_muse_mega.serving.weights import kernel_weights, weight_problems

    found = list(hooks.problems(hooks.SERVER))
    if _speculates():
        found += hooks.problems(hooks.SPECULATION)
    rank, ranks = place()
    try:
        config = target_config(hf_config)
        weights = kernel_weights(model, config, rank, ranks)
    except UserError as error:
        return [*found, _clause(error)]
    except AttributeError as error:
        return [*found, f"the loaded model has other parts than those of SGLang {SGLANG_VERSION}: {error}"]
    return [*found, *weight_problems(config, weights, ranks)]


def _speculates() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None


def _clause(error: UserError) -> str:
    """A sentence as an entry of a list."""
    return str(error).rstrip(".")
