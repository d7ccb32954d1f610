"""What inputs are like: sums of products that can be checked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from llmserve.builder import pieces
from llmserve.builder.calibration import activations
from llmserve.builder.calibration.activations import Inputs, Watched, watch_inputs, watched_names
from llmserve.builder.calibration.feedback import DAMPING_OF_FEW, Shares, shares_of
from llmserve.builder.pieces import Cores, Each, one_by_one
from llmserve.builder.quantization import Matrix
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.errors import Unsupported
from llmserve.models.graph import Op
from tests.engine.cpu.networks import Network, odd_network, random_ids

NETWORK = odd_network()
TEXTS = [random_ids(83, 40), random_ids(83, 7), random_ids(83, 61)]


def watched(each: Each = one_by_one) -> Mapping[str, Inputs]:
    return watch_inputs(
        NETWORK.program, TEXTS, NETWORK.arrays.__getitem__, advance=lambda name, num_elements: None, each=each
    ).inputs


class Seen:
    def __init__(self) -> None:
        self.layers: dict[str, Matrix] = {}
        self.of_experts: dict[tuple[str, int], Matrix] = {}

    def layer(self, op: Op, x: Matrix) -> None:
        self.layers[op.weights[0]] = x

    def second(self, op: Op, expert: int, x: Matrix) -> None:
        self.of_experts[op.weights[1], expert] = x


def seen_by(network: Network, texts: Sequence[Sequence[int]] = TEXTS) -> Seen:
    seen = Seen()
    ReferenceModel(network.program, network.arrays.__getitem__).watch([Run(ids) for ids in texts], seen)
    return seen


def seen_inputs() -> dict[str, Matrix]:
    return seen_by(NETWORK).layers


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
    alone = [seen_by(NETWORK, [ids]).layers[name] for ids in TEXTS]
    np.testing.assert_allclose(np.concatenate(alone), seen_inputs()[name], rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_ELEMENTS", 1)
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
    with pytest.raises(Unsupported, match=r"1\.down: with this calibration data"), np.errstate(all="ignore"):
        watch_inputs(NETWORK.program, TEXTS, arrays.__getitem__, advance=lambda name, num_elements: None)


EXPERTS = odd_network(experts=True)
DOWN = [f"{layer}.experts.down" for layer in range(3)]


def watched_experts(each: Each = one_by_one) -> Mapping[str, Shares]:
    found: Watched = watch_inputs(
        EXPERTS.program, TEXTS, EXPERTS.arrays.__getitem__, advance=lambda name, num_elements: None, each=each,
        rounded=[*DOWN, "0.down"],
    )  # fmt: skip
    return found.of_experts


def test_what_experts_share_follows_from_the_rows_that_they_are_chosen_for() -> None:
    """Few rows count for less."""
    found, seen = watched_experts(), seen_by(EXPERTS).of_experts
    assert found.keys() == set(DOWN)
    for name, shares in found.items():
        assert shares.shape == (19, 1, 64, 64)
        for expert, [of_expert] in enumerate(shares):
            x = np.pad(seen.get((name, expert), np.zeros((1, 48), np.float32)), ((0, 0), (0, 16)))
            wanted = shares_of((x.T @ x)[None], DAMPING_OF_FEW * 64 / len(x))
            np.testing.assert_allclose(of_expert, wanted[0], rtol=1e-3, atol=1e-4)
    rows = [len(x) for (name, _), x in seen.items() if name == DOWN[0]]
    assert sum(rows) == 3 * sum(map(len, TEXTS))
    with Cores(5) as cores:
        many = watched_experts(cores.each)
    assert all((found[name] == many[name]).all() for name in DOWN)


def test_what_experts_share_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks are narrower then, or there is no feedback, and the log says so."""
    monkeypatch.setattr(activations, "EXPERT_BLOCK_INPUTS", (64, 32))
    monkeypatch.setattr(activations, "MOST_EXPERT_BYTES", 3 * 19 * 2 * 32 * 32 * 2)
    assert {shares.shape for shares in watched_experts().values()} == {(19, 2, 32, 32)}
    assert not caplog.records
    monkeypatch.setattr(activations, "MOST_EXPERT_BYTES", 1)
    assert not watched_experts()
    assert "rounded without feedback" in caplog.text


def test_a_network_without_experts_shares_nothing_of_them() -> None:
    found = watch_inputs(
        NETWORK.program, TEXTS, NETWORK.arrays.__getitem__, advance=lambda name, num_elements: None,
        rounded=list(NETWORK.arrays),
    )  # fmt: skip
    assert not found.of_experts
