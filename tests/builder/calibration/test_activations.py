"""What inputs are like: sums of products that can be checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from llmserve.builder.calibration import activations
from llmserve.builder.calibration.activations import Inputs, watch_inputs, watched_names
from llmserve.builder.pieces import Cores, Each, one_by_one
from llmserve.builder.quantization import Matrix
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.errors import Unsupported
from llmserve.models.graph import Op
from tests.engine.cpu.networks import odd_network, random_ids

NETWORK = odd_network()
TEXTS = [random_ids(83, 40), random_ids(83, 7), random_ids(83, 61)]


def watched(each: Each = one_by_one) -> dict[str, Inputs]:
    return dict(
        watch_inputs(
            NETWORK.program, TEXTS, NETWORK.arrays.__getitem__, advance=lambda name, num_elements: None, each=each
        )
    )


def seen_inputs() -> dict[str, Matrix]:
    seen: dict[str, Matrix] = {}

    def look(op: Op, x: Matrix) -> None:
        seen[op.weights[0]] = x

    ReferenceModel(NETWORK.program, NETWORK.arrays.__getitem__).watch([Run(ids) for ids in TEXTS], look)
    return seen


@pytest.mark.parametrize("summed", [16, 2048])
def test_products_of_inputs_within_blocks(monkeypatch: pytest.MonkeyPatch, summed: int) -> None:
    monkeypatch.setattr(activations, "SUMMED_TOKENS", summed)
    monkeypatch.setattr(activations, "BLOCK_INPUTS", 32)
    found, seen = watched(), seen_inputs()
    assert found.keys() == seen.keys()
    assert {*watched_names(NETWORK.program), "head"} > set(seen)
    for name, x in seen.items():
        assert len(x) == sum(map(len, TEXTS))
        np.testing.assert_array_equal(found[name].peaks, np.abs(x).max(axis=0))
        for number, block in enumerate(found[name].moments):
            columns = x[:, 32 * number : 32 * number + 32].astype(np.float64)
            width = columns.shape[1]
            np.testing.assert_allclose(block[:width, :width], columns.T @ columns, rtol=1e-4, atol=1e-3)
            assert not block[width:].any()
            assert not block[:, width:].any()


def test_texts_are_watched_as_they_are_computed_one_by_one() -> None:
    """The runs do not see each other: what a text's matrices read is what they read without the others."""
    name = "2.down"
    alone: list[Matrix] = []

    def look(op: Op, x: Matrix) -> None:
        if op.weights[0] == name:
            alone.append(x)

    for ids in TEXTS:
        ReferenceModel(NETWORK.program, NETWORK.arrays.__getitem__).watch([Run(ids)], look)
    np.testing.assert_allclose(np.concatenate(alone), seen_inputs()[name], rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit() -> None:
    one = watched()
    with Cores(5) as cores:
        many = watched(cores.each)
    for name, inputs in one.items():
        np.testing.assert_array_equal(inputs.moments, many[name].moments)
        np.testing.assert_array_equal(inputs.peaks, many[name].peaks)


def test_divided_inputs() -> None:
    inputs = watched()["0.down"]
    factors = np.exp2(np.arange(37) % 5 - 2).astype(np.float32)
    found = inputs.divided(factors)
    np.testing.assert_array_equal(found.peaks, inputs.peaks / factors)
    wanted = inputs.moments[:, :37, :37] / factors[:, None] / factors
    np.testing.assert_array_equal(found.moments[:, :37, :37], wanted)
    assert not found.moments[:, 37:].any()


def test_numbers_that_have_no_square_are_refused_by_the_name_of_their_reader() -> None:
    arrays = {**NETWORK.arrays, "1.gate_up": NETWORK.arrays["1.gate_up"] * np.float32(1e15)}
    with pytest.raises(Unsupported, match=r"1\.down: with the calibration data"), np.errstate(all="ignore"):
        watch_inputs(NETWORK.program, TEXTS, arrays.__getitem__, advance=lambda name, num_elements: None)
