"""Device memory that other processes can map: CUDA IPC handles on one host, fabric handles in one NVLink domain.

Both kinds do the same for `peers.PeerMemory`: `allocate` this rank's arena, `share` it as bytes, `open` what another
rank shared, `close` and `free`.
"""

from typing import Any, Protocol

from sgl_muse_mega.errors import UserError
from sgl_muse_mega.megakernel.driver import checked


class Unopened(Exception):
    """Another rank's arena cannot be opened; the message says why, as the end of a sentence."""


class Handles(Protocol):
    def allocate(self, size: int) -> int:
        """Address of `size` bytes, which may be rounded up. Raises UserError when the driver refuses."""

    def share(self) -> bytes:
        """What another rank opens the allocation with."""

    def open(self, shared: bytes) -> int:
        """Address of another rank's allocation. Raises Unopened."""

    def close(self, address: int) -> None:
        """Ends what `open` began."""

    def free(self) -> None:
        """Gives the own allocation back; nothing if there is none."""


class IpcHandles:
    """cuMemAlloc and cuIpc*: processes of one host."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._own = driver, 0

    def allocate(self, size: int) -> int:
        self._own = int(checked(self._driver.cuMemAlloc(size), f"allocate {size} bytes of mailboxes"))
        return self._own

    def share(self) -> bytes:
        return bytes(
            checked(self._driver.cuIpcGetMemHandle(self._own), "share the mailboxes (cuIpcGetMemHandle)").reserved
        )

    def open(self, shared: bytes) -> int:
        driver = self._driver
        handle = driver.CUipcMemHandle()
        handle.reserved = shared
        lazily = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        code, *address = driver.cuIpcOpenMemHandle(handle, lazily)
        if int(code) != 0:
            raise Unopened(f"({code.name}); ranks in separate containers need one IPC and PID namespace")
        return int(address[0])

    def close(self, address: int) -> None:
        self._driver.cuIpcCloseMemHandle(address)

    def free(self) -> None:
        if self._own:
            self._driver.cuMemFree(self._own)
        self._own = 0


class FabricHandles:
    """cuMemCreate with CU_MEM_HANDLE_TYPE_FABRIC: processes of several hosts in one NVLink domain."""

    def __init__(self, driver: Any, device: int) -> None:
        self._driver, self._device = driver, device
        self._own: Any = None
        self._mapped: dict[int, tuple[int, Any]] = {}  # address: bytes, allocation

    def allocate(self, size: int) -> int:
        driver, what = self._driver, f"allocate {size} bytes of mailboxes for the fabric"
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device
        properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(checked(driver.cuMemGetAllocationGranularity(properties, least), what))
        rounded = -(-size // unit) * unit
        self._own = checked(driver.cuMemCreate(rounded, properties, 0), what)
        return self._map(self._own, rounded, what)

    def share(self) -> bytes:
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        shared = checked(
            self._driver.cuMemExportToShareableHandle(self._own, kind, 0),
            "share the mailboxes (cuMemExportToShareableHandle)",
        )
        size = next(size for size, allocation in self._mapped.values() if allocation is self._own)
        return size.to_bytes(8, "little") + bytes(shared.data)

    def open(self, shared: bytes) -> int:
        driver = self._driver
        handle = driver.CUmemFabricHandle()
        handle.data = shared[8:]
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        code, *allocation = driver.cuMemImportFromShareableHandle(handle.getPtr(), kind)
        if int(code) != 0:
            raise Unopened(
                f"({code.name}); the hosts must be of one NVLink domain with a running IMEX service, and the processes "
                "must be allowed its channel (/dev/nvidia-caps-imex-channels)"
            )
        try:
            return self._map(allocation[0], int.from_bytes(shared[:8], "little"), "map another rank's mailboxes")
        except UserError as error:
            driver.cuMemRelease(allocation[0])
            raise Unopened(f"({error})") from error

    def close(self, address: int) -> None:
        size, allocation = self._mapped.pop(address)
        self._driver.cuMemUnmap(address, size)
        self._driver.cuMemRelease(allocation)
        self._driver.cuMemAddressFree(address, size)

    def free(self) -> None:
        for address, (_, allocation) in list(self._mapped.items()):
            if allocation is self._own:
                self.close(address)
                self._own = None
        if self._own is not None:
            self._driver.cuMemRelease(self._own)
        self._own = None

    def _map(self, allocation: Any, size: int, what: str) -> int:
        """Gives an allocation an address that this rank's GPU may read and write."""
        driver = self._driver
        address = int(checked(driver.cuMemAddressReserve(size, 0, 0, 0), what))
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._device
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        try:
            checked(driver.cuMemMap(address, size, 0, allocation, 0), what)
            try:
                checked(driver.cuMemSetAccess(address, size, [access], 1), what)
            except UserError:
                driver.cuMemUnmap(address, size)
                raise
        except UserError:
            driver.cuMemAddressFree(address, size)
            raise
        self._mapped[address] = (size, allocation)
        return address


def supports_fabric(driver: Any, device: int) -> bool:
    """Whether the GPU's memory can be exported as fabric handles."""
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    code, *value = driver.cuDeviceGetAttribute(attribute, device)
    return int(code) == 0 and bool(value[0])
