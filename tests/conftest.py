"""Which tiers are run and how long each takes; front ends on free ports over a stub core, for whoever tests the wire
or a client.
"""

from __future__ import annotations

import os

# Before torch is imported, here and in programs under test: its threads wait turning, and each worker has one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import random
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from llmserve.frontends.shared.tracer import Tracer
from tests.checkpoints import KINDS
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore
from tests.tiers import TIERS, chosen_tiers, tier_of

TESTS = Path(__file__).parent
LONGEST_FIRST = (  # twenty seconds of a worker or more
    "test_docs.py",
    "test_sanitizers.py",
    "test_cpu_engine.py",
    "test_server_benchmark.py",
    "test_cluster.py",
    "test_published_repository.py",
    "test_determinism.py",
    "test_eval.py",
    "test_check_gpu.py",
    "test_check.py",
    "test_planted_defects.py",
    "test_cuda.py",
    "test_eval_harness.py",
    "test_cluster_server.py",
    "test_kernels.py",
    "test_rollout.py",
    "test_adapters.py",
    "test_schema.py",
    "test_files.py",
    "test_chat.py",
    "test_balancers.py",
    "test_engine.py",
    "test_demo.py",
    "test_conversations.py",
    "test_fairness.py",
    "test_gate_rates.py",
    "test_cuda_times.py",
    "test_template_limits.py",
    "test_bench_cluster.py",
    "test_lm_eval.py",
    "test_output.py",
    "test_windows.py",
    "test_serve.py",
    "test_spans.py",
    "test_reference.py",
    "test_runtime.py",
    "test_process.py",
    "test_tool_formats.py",
    "test_adapted_families.py",
    "test_dependencies.py",
    "test_wires.py",
    "test_interpreted_engine.py",
)

# Modules and tests stay for good: to look for garbage among them while they come takes seconds.
gc.disable()

# A busy machine takes as long as it takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
for phase in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, phase, 120.0)  # seconds, not five
# Each client would read all certificates again, for 20 ms.
default_transport: Any = httpx._transports.default
default_transport.create_ssl_context = cache(default_transport.create_ssl_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tiers", default="", help="of the tests, by comma: those of tests/tiers.py, first, rest")
    parser.addoption("--shuffle", type=int, help="a seed: files, and the tests of each, in random order")


def pytest_configure(config: pytest.Config) -> None:
    """Programs under test hear Ctrl-C, even if this one was started in the background, which ignores it."""
    try:
        tiers = chosen_tiers(config.getoption("--tiers"))
    except LookupError as error:
        raise pytest.UsageError(f"--tiers: {error}") from error
    config.pluginmanager.register(Tiers(frozenset(tiers)))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Tiers:
    """Leaves out the files of other tiers, and says at the end what that was and how long each tier took."""

    def __init__(self, chosen: frozenset[str]) -> None:
        self._chosen = chosen
        self._seconds = dict.fromkeys(TIERS, 0.0)
        self._counts: Counter[str] = Counter()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
            return None
        is_ours = collection_path.is_relative_to(TESTS)
        return True if is_ours and tier_of(collection_path.relative_to(TESTS).as_posix()) not in self._chosen else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tier = tier_of(report.nodeid.partition("::")[0].removeprefix("tests/"))
        self._seconds[tier] += report.duration
        self._counts[tier] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for tier in filter(self._counts.get, TIERS):
            minutes, seconds = divmod(round(self._seconds[tier]), 60)
            line = f"{tier:12} {self._counts[tier]:6} tests {minutes:4}:{seconds:02} of a worker's time"
            terminalreporter.write_line(line)
        if left_out := [tier for tier in TIERS if tier not in self._chosen]:
            terminalreporter.write_line(f"left out: {', '.join(left_out)} (make test-all runs every tier)")


@pytest.hookimpl(trylast=True)  # pytest itself brings together what shares a fixture
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first: begun near the end, one would keep its worker while the other waits."""
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)
        files = {item.path: random.Random(f"{seed} {item.path.name}").random() for item in items}
        items.sort(key=lambda item: files[item.path])
        return
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """What has been collected by now is not looked at again, not even at the end: that took two seconds a worker."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)  # checkpoints and engines are many objects, and hardly any of them is garbage


@pytest.fixture(scope="module", autouse=True)
def _configs_stay() -> Iterator[None]:
    """Kinds of networks share tables, such as a rope's scaling. Whoever hands one to transformers hands it a copy."""
    before = repr(KINDS)
    yield
    assert repr(KINDS) == before, "a test of this file wrote into a config of tests.checkpoints.KINDS"


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
