"""`Device` over NVIDIA's driver, with `cuda-bindings`: no toolkit, no torch, no runtime library.

Calls of the driver return (status, results...). A context belongs to a thread, but an engine is opened in one thread
and runs its steps in another, so every caller first makes the context current.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from llmserve.engine.cuda.device import Graph, HostMemory
from llmserve.engine.machine.nvidia import NO_GPU
from llmserve.errors import EngineFileError, InternalError, LlmserveError, ResourceExhausted, Unavailable, Unsupported

MISSING = "cuda engines require NVIDIA's bindings: pip install 'llmserve[cuda]'"
ERRORS: dict[str, type[LlmserveError]] = {
    "CUDA_ERROR_OUT_OF_MEMORY": ResourceExhausted,
    "CUDA_ERROR_INVALID_IMAGE": EngineFileError,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": EngineFileError,
    "CUDA_ERROR_INVALID_PTX": EngineFileError,
    "CUDA_ERROR_NOT_FOUND": EngineFileError,
    "CUDA_ERROR_NO_DEVICE": Unsupported,
    "CUDA_ERROR_INVALID_DEVICE": Unsupported,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": Unsupported,
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": Unsupported,
    "CUDA_ERROR_STUB_LIBRARY": Unsupported,
}

# What the compiler's assembler requires of a driver: CUDA 12, and 13 for Blackwell's architectures.
CURRENT = threading.local()  # `device`: whose context is current in a thread; several devices may share a thread
OLDEST_DRIVER, NEWER_DRIVER, NEWER_MAJOR = 12000, 13000, 10

FATAL = {  # the context, or the device, is lost
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_UNKNOWN",
}


def driver_api() -> Any:
    """The driver's functions. `Unsupported` says what is missing."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(f"{MISSING} ({error})") from None
    return driver


class NvidiaDevice:
    """One GPU, by its number for this process, with one stream for everything.

    Any failure after opening, except a lack of memory, ends the engine, because the context is then unusable.
    """

    def __init__(self, ordinal: int = 0, api: Any = None) -> None:
        self._api = api or driver_api()
        self._close = ExitStack()
        self._stream: Any = None
        try:
            _, version = self._api.cuDriverGetVersion()
        except (RuntimeError, OSError) as error:  # there is no libcuda
            raise Unsupported(NO_GPU.format("this machine has no NVIDIA driver (libcuda.so.1)")) from error
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._close.callback(self._call_late, "cuDevicePrimaryCtxRelease", self._device)
        try:
            self._enter()
            self.name = self._call("cuDeviceGetName", 256, self._device).split(b"\0")[0].decode()
            attributes = self._api.CUdevice_attribute
            major, minor = (
                self._call("cuDeviceGetAttribute", attribute, self._device)
                for attribute in (
                    attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                )
            )
            self.architecture = f"sm_{major}{minor}"
            self._check_driver(version, NEWER_DRIVER if major >= NEWER_MAJOR else OLDEST_DRIVER)
            self._stream = self._call("cuStreamCreate", self._api.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._close.callback(self._call_late, "cuStreamDestroy", self._stream)
        except BaseException:
            self.close()
            raise

    def free_bytes(self) -> int:
        self._enter()
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def allocate(self, num_bytes: int) -> int:
        self._enter()
        address = int(self._call("cuMemAlloc", num_bytes))
        self._close.callback(self._call_late, "cuMemFree", address)
        return address

    def host_memory(self, num_bytes: int) -> HostMemory:
        self._enter()
        address = int(self._call("cuMemHostAlloc", num_bytes, 0))
        self._close.callback(self._call_late, "cuMemFreeHost", address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def write(self, address: int, source: HostMemory) -> None:
        self._enter()
        self._call("cuMemcpyHtoDAsync", address, source.ctypes.data, source.nbytes, self._stream)

    def read(self, target: HostMemory, address: int) -> None:
        self._enter()
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, self._stream)

    def clear(self, address: int, num_bytes: int) -> None:
        self._enter()
        self._call("cuMemsetD8Async", address, 0, num_bytes, self._stream)

    def load(self, binary: bytes, symbol: str, *, shared_bytes: int, num_arguments: int) -> Any:
        self._enter()
        module = self._call("cuModuleLoadData", binary)
        self._close.callback(self._call_late, "cuModuleUnload", module)
        function = self._call("cuModuleGetFunction", module, symbol.encode())
        # always, because a kernel may have less than 48 KiB by default if some of it is static
        limit = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", function, limit, shared_bytes)
        return function

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        """The driver reads the arguments during the call."""
        self._enter()
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        begin = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(*(begin + 8 * place for place in range(len(arguments))))
        place = ctypes.addressof(pointers)
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, self._stream, place, 0)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """The yielded graph can run once the capture is over."""
        self._enter()
        mode = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        graph = CapturedGraph()
        try:
            yield graph
        finally:
            captured = self._call("cuStreamEndCapture", self._stream)
        graph.executable = self._call("cuGraphInstantiate", captured, 0)
        self._close.callback(self._call_late, "cuGraphExecDestroy", graph.executable)
        self._call("cuGraphDestroy", captured)

    def run(self, graph: Graph) -> None:
        self._enter()
        self._call("cuGraphLaunch", graph.executable, self._stream)

    def make_event(self) -> Any:
        self._enter()
        event = self._call("cuEventCreate", self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._close.callback(self._call_late, "cuEventDestroy", event)
        return event

    def record(self, event: Any) -> None:
        self._enter()
        self._call("cuEventRecord", event, self._stream)

    def wait(self, event: Any) -> None:
        self._enter()
        self._call("cuEventSynchronize", event)

    def synchronize(self) -> None:
        self._enter()
        self._call("cuStreamSynchronize", self._stream)

    def close(self) -> None:
        """Wait for running work, which uses memory that is about to be freed. May be called again."""
        if (stream := self._stream) is not None:
            self._stream = None
            self._call_late("cuStreamSynchronize", stream)
        self._close.close()
        CURRENT.device = None  # of this thread; others ask no more

    def _check_driver(self, version: int, oldest: int) -> None:
        if version < oldest:
            raise Unsupported(
                f"the driver is too old: it supports CUDA {_release(version)}; engines for {self.architecture} require "
                f"CUDA {_release(oldest)} or newer; update it"
            )

    def _enter(self) -> None:
        if getattr(CURRENT, "device", None) is not self:
            self._call("cuCtxSetCurrent", self._context)
            CURRENT.device = self

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's only result, or all of them."""
        try:
            status, *results = getattr(self._api, name)(*arguments)
        except RuntimeError as error:  # the bindings have looked for it in libcuda
            raise Unsupported(f"the driver is too old: it has no {name} ({error}); update it") from error
        except ValueError as error:  # a status that the bindings do not know
            raise Unavailable(f"{name} failed: {error}") from error
        if status == self._api.CUresult.CUDA_SUCCESS:
            return results[0] if len(results) == 1 else tuple(results)
        failure = ERRORS.get(status.name, Unavailable if status.name in FATAL else InternalError)
        _, text = self._api.cuGetErrorString(status)
        raise failure(f"{name} failed: {status.name}, {(text or b'').decode()}")

    def _call_late(self, name: str, *arguments: Any) -> None:
        """A call at the end: a lost device has nothing to free."""
        if name != "cuDevicePrimaryCtxRelease":
            self._api.cuCtxSetCurrent(self._context)
        getattr(self._api, name)(*arguments)


class CapturedGraph:
    """The result of a capture; `executable` is set at its end."""

    executable: Any = None


def _release(version: int) -> str:
    """A CUDA version in the usual form."""
    return f"{version // 1000}.{version % 1000 // 10}"
