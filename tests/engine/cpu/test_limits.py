"""Rates that this machine reaches: of the right size, and refused in words where they cannot be measured."""

from __future__ import annotations

import pytest

from llmserve.engine.cpu import limits
from llmserve.engine.cpu.limits import Limit, measure_limit
from llmserve.engine.cpu.runner import available_isas
from llmserve.engine.native.library import load_library
from llmserve.errors import InvalidArgument, ResourceExhausted, Unsupported


@pytest.mark.parametrize("isa", available_isas())
def test_products_per_second_are_those_of_a_computer(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROUNDS", 50_000)
    floats, integers = (measure_limit(limit, threads=1, isa=isa) for limit in (Limit.MULTIPLY, Limit.MULTIPLY_INT8))
    assert 1e8 < floats < 1e13
    assert 1e7 < integers < 1e14


def test_every_thread_reads_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 32 * 2**20)
    assert all(1e8 < measure_limit(Limit.READ, threads=threads) < 1e14 for threads in (1, 3))


@pytest.mark.parametrize("amount", [1, 1023, 3 * 1024 + 1])
def test_any_number_of_bytes_can_be_read(amount: int) -> None:
    assert min(load_library().measure(Limit.READ, "", threads=2, amount=amount, num_passes=5)) > 0


def test_what_cannot_be_measured_is_refused() -> None:
    library = load_library()
    for limit, threads, amount in ((3, 1, 1), (0, 0, 1), (0, 1025, 1), (1, 1, 0)):
        with pytest.raises(InvalidArgument, match=r"no such limit|threads must be|at least 1"):
            library.measure(limit, "", threads=threads, amount=amount, num_passes=1)
    with pytest.raises(InvalidArgument, match="no kernels 'mmx'"):
        library.measure(0, "mmx", threads=1, amount=1, num_passes=1)
    with pytest.raises(Unsupported, match="no 'mmx' kernels"):
        measure_limit(Limit.READ, isa="mmx")
    with pytest.raises(ResourceExhausted, match="no memory for a buffer"):
        library.measure(Limit.READ, "", threads=1, amount=2**62, num_passes=1)
