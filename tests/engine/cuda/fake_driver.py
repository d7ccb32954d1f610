"""The functions of cuda.bindings.driver that `NvidiaDevice` calls, over the host's memory: their signatures, their
(status, results...) and the rules by which the real ones fail. Kernels do not run; launches are written down.
"""

from __future__ import annotations

import ctypes
import threading
from enum import Enum
from types import SimpleNamespace
from typing import Any


class Status(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


OK = Status.CUDA_SUCCESS


class FakeDriver:
    """`total_bytes`: of the device. A call without a current context fails, as does all but a launch in a capture."""

    CUresult = Status
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, total_bytes: int = 1 << 20, num_devices: int = 1) -> None:
        self.free_bytes = total_bytes
        self.memory: dict[int, Any] = {}
        self.held: list[str] = []  # what has not been given back
        self.launches: list[tuple[str, tuple[int, ...], int, list[int]]] = []
        self.shared: dict[str, int] = {}
        self.failing: Status | None = None  # of whatever comes next
        self.version = 12090
        self.major = 9  # of the compute capability
        self.contexts: list[Any] = []  # of allocations
        self.held_when_waited: list[str] = []
        self._num_devices = num_devices
        self._captured: list[Any] | None = None
        self._current = threading.local()

    def cuDriverGetVersion(self) -> Any:
        return OK, self.version

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (OK, ordinal) if ordinal < self._num_devices else (Status.CUDA_ERROR_INVALID_DEVICE, 0)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._hold("context", f"context {device}")

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.held.remove("context")
        return (OK,)

    def cuCtxSetCurrent(self, context: str) -> Any:
        self._current.context = context
        return (OK,)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"Fake H200\0\0\0"

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:
        return OK, {75: self.major, 76: 0}[attribute]

    def cuStreamCreate(self, flags: int) -> Any:
        return self._hold("stream", "stream")

    def cuStreamDestroy(self, stream: str) -> Any:
        self.held.remove("stream")
        return (OK,)

    def cuEventCreate(self, flags: int) -> Any:
        return self._checked(lambda: self._hold("event", "event"))

    def cuEventRecord(self, event: str, stream: str) -> Any:
        return self._checked(lambda: (OK,))

    def cuEventSynchronize(self, event: str) -> Any:
        return self._checked(lambda: (OK,))

    def cuEventDestroy(self, event: str) -> Any:
        self.held.remove("event")
        return (OK,)

    def cuMemGetInfo(self) -> Any:
        return self._checked(lambda: (OK, self.free_bytes, 1 << 40))

    def cuMemAlloc(self, num_bytes: int) -> Any:
        if num_bytes > self.free_bytes:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        self.free_bytes -= num_bytes
        self.contexts.append(getattr(self._current, "context", None))
        return self._checked(lambda: self._allocated("device", num_bytes))

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> Any:
        return self._checked(lambda: self._allocated("host", num_bytes))

    def cuMemFree(self, address: int) -> Any:
        return self._freed("device", address)

    def cuMemFreeHost(self, address: int) -> Any:
        return self._freed("host", address)

    def cuMemcpyHtoDAsync(self, target: int, source: int, num_bytes: int, stream: str) -> Any:
        return self._checked(lambda: (OK, ctypes.memmove(target, source, num_bytes))[:1])

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync

    def cuMemsetD8Async(self, address: int, value: int, num_bytes: int, stream: str) -> Any:
        return self._checked(lambda: (OK, ctypes.memset(address, value, num_bytes))[:1])

    def cuModuleLoadData(self, image: bytes) -> Any:
        if not image.startswith(b"\x7fELF"):
            return Status.CUDA_ERROR_NO_BINARY_FOR_GPU, None
        return self._checked(lambda: self._hold("module", image))

    def cuModuleUnload(self, module: bytes) -> Any:
        self.held.remove("module")
        return (OK,)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> Any:
        return (OK, name.decode()) if name in module else (Status.CUDA_ERROR_NOT_FOUND, None)

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> Any:
        self.shared[function] = value
        return (OK,)

    def cuLaunchKernel(self, function: str, *rest: Any) -> Any:
        *shape, shared_bytes, stream, parameters, extra = rest
        x, y, z, *threads = shape
        if threads[1:] != [1, 1] or stream != "stream" or extra != 0:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        if shared_bytes > self.shared.get(function, 48 << 10):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        pointers = (ctypes.c_void_p * 3).from_address(parameters)
        arguments = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers if pointer is not None]
        launch = (function, (x, y, z, threads[0]), shared_bytes, arguments)
        (self.launches if self._captured is None else self._captured).append(launch)
        return (OK,)

    def cuStreamBeginCapture(self, stream: str, mode: int) -> Any:
        self._captured = []
        return (OK,)

    def cuStreamEndCapture(self, stream: str) -> Any:
        captured, self._captured = self._captured, None
        return self._hold("graph", captured)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return self._hold("executable", graph)

    def cuGraphDestroy(self, graph: Any) -> Any:
        self.held.remove("graph")
        return (OK,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        self.held.remove("executable")
        return (OK,)

    def cuGraphLaunch(self, graph: Any, stream: str) -> Any:
        def run() -> Any:
            self.launches.extend(graph)
            return (OK,)

        return self._checked(run)

    def cuStreamSynchronize(self, stream: str) -> Any:
        self.held_when_waited = list(self.held)
        return self._checked(lambda: (OK,))

    def cuGetErrorString(self, status: Status) -> Any:
        return OK, f"text of {status.value}".encode()

    def _checked(self, call: Any) -> Any:
        if getattr(self._current, "context", None) is None:
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        if self._captured is not None:
            return (Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        failing, self.failing = self.failing, None
        return (failing,) if failing else call()

    def _hold(self, kind: str, thing: Any) -> Any:
        self.held.append(kind)
        return OK, thing

    def _allocated(self, kind: str, num_bytes: int) -> Any:
        memory = (ctypes.c_uint8 * num_bytes)()
        address = ctypes.addressof(memory)
        self.memory[address] = memory
        return self._hold(kind, address)

    def _freed(self, kind: str, address: int) -> Any:
        del self.memory[address]
        self.held.remove(kind)
        return (OK,)
