"""Engines are compiled once per test session and opened where they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from llmserve.engine.cpu.runner import CpuRunner
from llmserve.scheduler.speculation import Speculator
from tests.engine.cpu.networks import LIMITS, Network, encoder_network, odd_network
from tests.engine.cpu.other_process import ISAS, PROGRAM, OtherRunner

NETWORKS: dict[str, Callable[[], Network]] = {
    "rope": odd_network,
    "alibi": lambda: odd_network(alibi=True),
    "experts": lambda: odd_network(experts=True),
    "peculiar": lambda: odd_network(peculiar=True),
    "plain": lambda: odd_network(plain=True),
    "routers": lambda: odd_network(plain=True, experts=True),
    "states": lambda: odd_network(states=True),
}
POOLING: dict[str, Callable[[], Network]] = {  # that make no tokens
    "encoder": encoder_network,
    "scorer": lambda: encoder_network(scores=True),
}
EngineFile = Callable[..., Path]
OpenRunner = Callable[..., CpuRunner | OtherRunner]


@pytest.fixture
def rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is measured: on a busy machine a row may seem to cost so much that next to nothing is drafted."""
    monkeypatch.setattr(Speculator, "observe", lambda speculator, plan, seconds: None)
    monkeypatch.setattr("llmserve.engine.cpu.runner.row_times", lambda path, machine: ())


@pytest.fixture(scope="session")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> EngineFile:
    """(network, dtype, quantization, KV cache dtype) -> path of its engine file."""
    folder = tmp_path_factory.mktemp("engines")

    @cache
    def compiled(network: str, dtype: str, quantization: str, cache_dtype: str = "auto") -> Path:
        options = dataclasses.replace(LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=cache_dtype)
        made = (NETWORKS | POOLING)[network]()
        return made.compile(folder / f"{network}-{dtype}-{quantization}-{cache_dtype}.engine", options)

    return compiled


@pytest.fixture
def open_runner() -> Iterator[OpenRunner]:
    """Opens runners that are closed when the test ends."""
    opened: list[CpuRunner | OtherRunner] = []

    def open_one(
        path: Path, *, num_blocks: int = 64, threads: int = 1, isa: str = "", program: Sequence[str] = PROGRAM
    ) -> CpuRunner | OtherRunner:
        limits = {"num_blocks": num_blocks, "threads": threads}
        if program:
            opened.append(OtherRunner(program, path, isa=isa or ISAS[-1], **limits))
        else:
            opened.append(CpuRunner.open(path, isa=isa, num_blocks=num_blocks, threads=threads))
        return opened[-1]

    yield open_one
    for runner in opened:
        runner.close()
