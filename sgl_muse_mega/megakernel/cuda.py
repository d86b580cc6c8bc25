"""The GPU: cubins through NVIDIA's cuda-bindings, launched on torch's current stream."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel import driver as cuda_driver
from sgl_muse_mega.megakernel.build import HOPPER, Progress, build, quiet
from sgl_muse_mega.megakernel.compiled import Compiled
from sgl_muse_mega.megakernel.driver import checked
from sgl_muse_mega.megakernel.machine import Boxes
from sgl_muse_mega.megakernel.protocol import RECORD_WORDS, FaultRecord
from sgl_muse_mega.megakernel.step import Step

DEADLINE_SECONDS = 5.0
TARGETS: Mapping[tuple[int, int], str] = {(9, 0): HOPPER}
"""What nvcc compiles for a compute capability; those that have run."""


class CudaModule:
    """One compiled instance, loaded eagerly: a lazy load would wait for kernels that spin."""

    def __init__(self, path: Path, instance: Compiled) -> None:
        driver = self._driver = cuda_driver.driver()
        self._instance = instance
        image = path.read_bytes()
        self._module = checked(driver.cuModuleLoadData(image), f"load {path}")
        self._functions: dict[str, Any] = {}
        shared = instance.shared_offsets["SHARED_BYTES"]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for name in instance.kernels:
            function = checked(driver.cuModuleGetFunction(self._module, name.encode()), f"find {name}")
            checked(driver.cuFuncSetAttribute(function, attribute, shared), f"give {name} {shared} bytes of memory")
            blocks = checked(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, instance.threads, shared), "ask occupancy"
            )
            if blocks < 1:
                raise UserError(
                    f"A CTA of {name} ({instance.threads} threads, {shared} bytes of shared memory) does not fit an SM "
                    "of this GPU; the kernels need one resident CTA per SM."
                )
            self._functions[name] = function

    def launch(self, kernel: str, params: ctypes.Structure) -> None:
        """One CTA per SM on torch's current stream, with programmatic dependent launch."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._instance.sms, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._instance.threads, 1, 1
        config.sharedMemBytes = self._instance.shared_offsets["SHARED_BYTES"]
        config.hStream = torch.cuda.current_stream().cuda_stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        checked(
            driver.cuLaunchKernelEx(config, self._functions[kernel], ctypes.addressof(pointers), 0), f"launch {kernel}"
        )


class CudaMachine:
    """One GPU of this process."""

    def __init__(
        self,
        device: torch.device | str = "cuda",
        deadline_seconds: float = DEADLINE_SECONDS,
        defines: Sequence[str] = (),
        targets: Mapping[tuple[int, int], str] = TARGETS,
    ) -> None:
        """defines: macros for every kernel, "NAME" or "NAME=VALUE", for those under a tool or in the making.

        Raises UserError on a GPU that is not among `targets`.
        """
        if not torch.cuda.is_available():
            raise UserError(
                "The kernels need a GPU and torch finds none; run them on a machine with one (generate and eval can do "
                "without: --backend reference)."
            )
        device = torch.device(device)
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        properties = torch.cuda.get_device_properties(self.device)
        target = targets.get((properties.major, properties.minor))
        if target is None:
            raise UserError(
                f"The kernels are built for compute capability 9.0 (H100, H200) and this is a {properties.name} with "
                f"{properties.major}.{properties.minor}; use --backend reference."
            )
        self._target = target
        self.sms = properties.multi_processor_count
        self._defines = tuple(defines)
        self.deadline_ns = int(deadline_seconds * 1e9)
        torch.zeros(1, device=self.device)  # makes torch's primary context current for the driver calls
        self.fault_record = torch.zeros(RECORD_WORDS, dtype=torch.int64, pin_memory=True)

    def load(self, instance: Compiled, progress: Progress = quiet) -> CudaModule:
        artifact = build(instance, self._target, progress, self._defines)
        artifact.check(instance)
        return CudaModule(artifact.path, instance)

    def describe_boxes(self, boxes: Boxes) -> bytes:
        driver = cuda_driver.driver()
        described = checked(
            driver.cuTensorMapEncodeTiled(
                driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
                3,
                boxes.address,
                [driver.cuuint64_t(n) for n in boxes.extents],
                [driver.cuuint64_t(n) for n in boxes.strides],
                [driver.cuuint32_t(n) for n in boxes.box],
                [driver.cuuint32_t(1)] * 3,
                driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
                driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
                driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
            "describe the expert weights",
        )
        return b"".join(int(word).to_bytes(8, "little") for word in described.opaque)

    def attach(self, step: Step, caches: list[tuple[Tensor, Tensor]]) -> None:
        """A GPU needs no declaration of memory."""

    def declare(
        self,
        memory: Sequence[tuple[str, Tensor, bool, bool]],
        step: Step | None = None,
        caches: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """A GPU needs no declaration of memory."""

    def lend(self, memory: Sequence[tuple[str, Tensor, bool]]) -> None:
        """A GPU needs no declaration of memory."""

    def synchronize(self) -> None:
        """Waits for everything. Raises UserError with the sentence of a kernel that gave up waiting."""
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            record = FaultRecord.read(self.fault_record.tolist())
            if record is None:
                raise
            raise UserError(record.sentence()) from error
