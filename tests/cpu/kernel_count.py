"""Counts what PyTorch would put on a GPU's stream: kernels and copies, of operations that run here on a CPU."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATIONS = ("aten.empty", "aten.new_empty")
VIEWS = ("aten._unsafe_view", "aten._reshape_alias", "aten.detach", "aten.lift_fresh")


class KernelCount(TorchDispatchMode):
    """Inside this context every operation that is neither a view nor an allocation counts, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if not (func.is_view or name.startswith((*ALLOCATIONS, *VIEWS))):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))
