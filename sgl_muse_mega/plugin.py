"""What SGLang calls in every process of a server: says where the megakernel's spec is, and nothing else.

SGLang demands the entry-point name `nvidia_megakernel`, runs only one distribution's function under a name, and does
not say whose. So the same function has a second name, under which it runs whoever wins the first.
"""

import functools
import logging
import os
from importlib.metadata import entry_points

logger = logging.getLogger(__name__)

GROUP = "sglang.srt.plugins"
NAMES = ("nvidia_megakernel", "muse_mega")
ARCHITECTURE = "MuseSparkForConditionalGeneration"
SPEC = "sgl_muse_mega.serving.spec:SPEC"


@functools.cache
def register() -> None:
    """Registers the spec by its path; imports no model code and touches no GPU.

    Raises RuntimeError when another plugin has registered this architecture.
    """
    from sglang.kernels.plugin_kernels.nvidia import spec

    _report_namesakes()
    try:
        spec.register(architecture=ARCHITECTURE, path=SPEC)
    except ValueError as error:
        raise RuntimeError(
            f"sgl-muse-mega cannot serve {ARCHITECTURE} because another plugin has taken it ({error}); uninstall one "
            f"of the two, or name the one to run in SGLANG_PLUGINS ({NAMES[1]} is ours)."
        ) from error
    if os.environ.get("SGLANG_MUSE_MEGA_SERVING") == "1":
        # Set by the process that accepted --enable-nvidia-megakernel: this one may load the model's weights.
        from sgl_muse_mega.serving import scales

        scales.register_hook()


def _report_namesakes() -> None:
    """One warning when another distribution offers the name that SGLang demands."""
    owners = {entry.dist.name for entry in entry_points(group=GROUP, name=NAMES[0]) if entry.dist}
    others = sorted(owners - {"sgl-muse-mega"})
    if others:
        logger.warning(
            "sgl-muse-mega: %s also provides the plugin %r, and SGLang runs only one of them under that name; "
            "Muse Spark is still ours through %r, unless SGLANG_PLUGINS leaves it out.",
            ", ".join(others),
            *NAMES,
        )
