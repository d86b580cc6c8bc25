"""The CUDA driver through NVIDIA's cuda-bindings."""

from typing import Any

from sgl_muse_mega.errors import UserError


def driver() -> Any:
    """cuda.bindings.driver. Raises UserError when it is not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise UserError(
            "The kernels are launched through cuda-bindings, which is not installed; "
            "run `pip install 'sgl-muse-mega[cuda]'`."
        ) from error
    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The values of a driver call. Raises UserError when it failed."""
    code, *values = result
    if int(code) != 0:
        raise UserError(f"The CUDA driver could not {what}: {code.name}.")
    return values[0] if len(values) == 1 else values
