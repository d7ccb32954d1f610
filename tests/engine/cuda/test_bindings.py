"""`NvidiaDevice` against a driver that has the real one's signatures; and that these are the real ones'."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from llmserve.engine.cuda.bindings import ERRORS, FATAL, NvidiaDevice, driver_api
from llmserve.errors import EngineFileError, InternalError, ResourceExhausted, Unavailable, Unsupported
from tests.engine.cuda.fake_driver import FakeDriver, Status

IMAGE = b"\x7fELF ... product ..."


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[NvidiaDevice]:
    opened = NvidiaDevice(api=driver)
    yield opened
    opened.close()
    opened.close()
    assert driver.held == []
    assert driver.memory == {}


def test_the_fake_has_what_the_real_bindings_have() -> None:
    """Every function with as many parameters, and the names of errors and constants."""
    real = driver_api()
    for name, function in inspect.getmembers(FakeDriver, inspect.isfunction):
        if not name.startswith("cu"):
            continue
        documented = str(getattr(real, name).__doc__).strip().split("\n")[0]
        given = documented.partition("(")[2].rpartition(")")[0]
        wanted = len([part for part in given.split(",") if part.strip()])
        own = list(inspect.signature(function).parameters)[1:]
        assert "rest" in own or len(own) == wanted, f"{name}: {documented}"
    for status in Status:
        assert int(getattr(real.CUresult, status.name)) == status.value
    for name in [*ERRORS, *FATAL]:
        assert hasattr(real.CUresult, name), name
    for kind in (
        "CUdevice_attribute",
        "CUfunction_attribute",
        "CUstream_flags",
        "CUstreamCaptureMode",
    ):
        for name, value in vars(getattr(FakeDriver, kind)).items():
            assert int(getattr(getattr(real, kind), name)) == value, name


def test_it_says_what_the_device_is(device: NvidiaDevice, driver: FakeDriver) -> None:
    assert (device.name, device.architecture) == ("Fake H200", "sm_90")
    device.allocate(1000)
    assert device.free_bytes() == driver.free_bytes == (1 << 20) - 1000


def test_memory_goes_there_and_back(device: NvidiaDevice) -> None:
    address, here, back = device.allocate(16), device.host_memory(16), device.host_memory(16)
    here[:] = np.arange(16)
    device.write(address, here)
    device.clear(address + 4, 4)
    device.read(back, address)
    device.synchronize()
    assert back.tolist() == [0, 1, 2, 3, 0, 0, 0, 0, *range(8, 16)]


def test_a_graph_launches_what_was_captured_each_time(device: NvidiaDevice, driver: FakeDriver) -> None:
    function = device.load(IMAGE, "product", shared_bytes=96 << 10, num_arguments=3)
    with device.capture() as graph:
        device.launch(function, (4, 5, 6), 256, 96 << 10, [11, 22, 33])
    assert driver.launches == []
    device.run(graph)
    device.run(graph)
    assert driver.launches == [("product", (4, 5, 6, 256), 96 << 10, [11, 22, 33])] * 2


def test_any_thread_may_ask(device: NvidiaDevice) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(device.free_bytes()))
    thread.start()
    thread.join()
    assert found


def test_too_little_memory_and_wrong_binaries_are_their_own_errors(device: NvidiaDevice) -> None:
    with pytest.raises(ResourceExhausted, match=r"cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY, text of 2"):
        device.allocate(1 << 30)
    with pytest.raises(EngineFileError, match="NO_BINARY_FOR_GPU"):
        device.load(b"text", "product", shared_bytes=0, num_arguments=3)
    with pytest.raises(EngineFileError, match="NOT_FOUND"):
        device.load(IMAGE, "sum", shared_bytes=0, num_arguments=3)


def test_a_device_that_is_lost_is_unavailable_and_a_wrong_call_a_fault_of_ours(
    device: NvidiaDevice, driver: FakeDriver
) -> None:
    driver.failing = Status.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(Unavailable, match="cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        device.synchronize()
    with device.capture(), pytest.raises(InternalError, match="STREAM_CAPTURE_UNSUPPORTED"):
        device.synchronize()


def test_devices_that_share_a_thread_have_a_context_each() -> None:
    driver = FakeDriver(num_devices=2)
    first, second = NvidiaDevice(0, api=driver), NvidiaDevice(1, api=driver)
    for device in (first, second, first):
        device.allocate(8)
    second.close()
    first.allocate(8)
    first.close()
    assert driver.contexts == ["context 0", "context 1", "context 0", "context 0"]


def test_what_is_under_way_ends_before_its_memory_is_given_back(driver: FakeDriver) -> None:
    device = NvidiaDevice(api=driver)
    device.allocate(8)
    device.close()
    assert {"device", "stream", "context"} <= set(driver.held_when_waited)


def test_every_kernel_may_have_the_shared_memory_that_it_is_launched_with(
    device: NvidiaDevice, driver: FakeDriver
) -> None:
    """48 KiB are only there without asking where none of them is static."""
    device.load(IMAGE, "product", shared_bytes=48 << 10, num_arguments=3)
    assert driver.shared == {"product": 48 << 10}


def test_a_status_of_a_newer_driver_ends_the_engine_as_a_lost_device_does(
    device: NvidiaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*arguments: object) -> None:
        raise ValueError("998 is not a valid CUresult")

    monkeypatch.setattr(driver, "cuMemGetInfo", unknown)
    with pytest.raises(Unavailable, match="cuMemGetInfo failed: 998 is not a valid CUresult"):
        device.free_bytes()


def test_a_gpu_that_is_not_there_is_named_and_nothing_is_kept(driver: FakeDriver) -> None:
    with pytest.raises(Unsupported, match="CUDA_ERROR_INVALID_DEVICE"):
        NvidiaDevice(3, api=driver)
    assert driver.held == []


@pytest.mark.parametrize(
    ("version", "major", "problem"),
    [
        (11080, 9, "the driver is too old: it supports CUDA 11.8; engines for sm_90 require CUDA 12.0 or newer"),
        (12090, 12, "it supports CUDA 12.9; engines for sm_120 require CUDA 13.0 or newer; update it"),
        (12000, 9, ""),
        (13020, 12, ""),
    ],
)
def test_a_driver_that_is_too_old_is_told_so(version: int, major: int, problem: str, driver: FakeDriver) -> None:
    driver.version, driver.major = version, major
    if problem:
        with pytest.raises(Unsupported, match=re.escape(problem)):
            NvidiaDevice(0, api=driver)
    else:
        NvidiaDevice(0, api=driver).close()
    assert driver.held == []


def test_a_function_that_the_driver_does_not_have_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the bindings say it."""

    def missing(*arguments: object) -> None:
        raise RuntimeError('Function "cuStreamCreate" not found')

    monkeypatch.setattr(driver, "cuStreamCreate", missing)
    with pytest.raises(Unsupported, match="the driver is too old: it has no cuStreamCreate"):
        NvidiaDevice(0, api=driver)
    assert driver.held == []
