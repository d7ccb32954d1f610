"""What a model of time reads from machine code, and how far it is from what an H200 measured."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.cuda_times import H100, H200, MEASURED, Network, Step, measured

ONE, SIXTEEN = Step(1, 32), Step(16, 32)


@pytest.fixture(scope="module")
def floats() -> Network:
    return Network("float16", [ONE, SIXTEEN])


@pytest.fixture(scope="module")
def integers() -> Network:
    return Network("int8", [ONE, SIXTEEN])


def test_measurements_are_read_from_their_page() -> None:
    found = measured(MEASURED.read_text())
    assert found[ONE] == {"float16": 126.0, "int8": 94.0, "int4": 77.0}
    assert found[Step(1100, 1100, is_prompt=True)] == {"float16": 1050.0, "int8": 3990.0}
    assert sum(map(len, found.values())) == 44


def test_a_layer_takes_about_as_long_as_measured(floats: Network, integers: Network) -> None:
    times = measured(MEASURED.read_text())[ONE]
    for precision, network in (("float16", floats), ("int8", integers)):
        assert network.layer_us(ONE, H200) == pytest.approx(times[precision], rel=0.15)
        assert 0.4 < network.fraction(ONE, H200) < network.fraction(ONE, H100) < 0.9  # launches count less there


def test_integers_are_faster_than_floats_for_one_row_and_for_sixteen(floats: Network, integers: Network) -> None:
    for step in (ONE, SIXTEEN):
        assert integers.layer_us(step, H200) < 0.85 * floats.layer_us(step, H200)


def test_bytes_and_products_are_those_of_the_weights(floats: Network) -> None:
    weights = 4096 * (3 * 4096 + 4096 + 3 * 11008)
    work = [each.work for each in floats.launches(ONE, H200) if each.kernel.function.startswith("linear.")]
    assert sum(one.products for one in work) == weights
    assert sum(one.num_bytes for one in work) == 2 * weights
    assert {each.bound for each in floats.launches(ONE, H200) if each.work.num_bytes > 1e7} == {"bytes"}


def test_turns_of_a_loop_make_all_products(floats: Network, integers: Network) -> None:
    """Floats come ahead, by matrix instructions; integers are loaded and multiplied by words."""
    for network, is_ahead in ((floats, True), (integers, False)):
        for launched in network.launches(ONE, H200):
            constants, work = dict(launched.kernel.constants), launched.work
            if work.turns < 2 or "NUM_INPUTS" not in constants:
                continue
            loop = network.code_of(launched.kernel).loop
            assert loop is not None
            rows, columns = int(constants["TILE_ROWS"]), int(constants["TILE_COLUMNS"])
            parts = (
                work.programs * columns // (int(constants["NUM_COLUMNS"]) * (1 + ("gated" in launched.kernel.function)))
            )
            whole = rows * columns * int(constants["NUM_INPUTS"]) / max(1, parts)
            assert whole <= work.turns * loop.products < whole + loop.products
            assert (loop.copies > 0, loop.matrix > 0, loop.loads > 0) == (is_ahead, is_ahead, not is_ahead)


def test_a_norm_of_sums_in_segments_is_no_launch_of_its_own(floats: Network) -> None:
    """Only the first norm of a network, and the last sum, which the head reads."""
    found = Counter(each.kernel.function for each in floats.launches(ONE, H200, num_layers=2))
    assert (found["linear.add_normed_segments"], found["linear.add_segments"], found["rowwise.rms_norm"]) == (3, 1, 1)


def test_code_without_a_loop_has_none(floats: Network) -> None:
    (norm,) = {each.kernel for each in floats.launches(ONE, H200) if each.kernel.function == "rowwise.rms_norm"}
    code = floats.code_of(norm)
    assert code.loop is None
    assert code.stalls > code.instructions > 20
