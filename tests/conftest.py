"""Front ends on free ports over a stub core, for whoever tests the wire or a client."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from llmserve.frontends.shared.tracer import Tracer
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore

LONGEST_FIRST = ("test_sanitizers.py", "test_docs.py", "test_check_gpu.py", "test_server_benchmark.py")

# A busy machine takes as long as it takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure() -> None:
    """Programs under test hear Ctrl-C, even if this one was started in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first: begun near the end, one would keep its worker while the other waits."""
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(StubCore, tracer=Tracer(os.devnull)) as running:
        yield running


@pytest.fixture
def core(server: RunningServer) -> Iterator[StubCore]:
    assert isinstance(server.core, StubCore)
    server.core.requests.clear()
    server.core.loaded.clear()
    server.core.unloaded.clear()
    server.core.pulled = 0
    yield server.core
    server.core.is_ready = True
    server.core.slow_s = StubCore.slow_s
