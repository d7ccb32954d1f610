"""Requests that do not fit a model's config are refused in Triton's words; reshape and output order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument
from llmserve.serving.signature import BATCH_NOTE, ModelSignature
from llmserve.serving.types import Tensor
from tests.serving.models import request, tensors


def signature(text: str) -> ModelSignature:
    return ModelSignature(text_format.Parse('name: "m"\n' + text, ModelConfig()))


PAIR = tensors("input", A="FP32 [ 4 ]", B="INT32 [ -1 ]") + tensors("output", C="FP32 [ 4 ]")
PLAIN = signature(PAIR)
BATCHED = signature("max_batch_size: 4\n" + PAIR)
OPTIONAL = signature(tensors("input", A="FP32 [ 1 ]", B="FP32 [ 1 ]", C="FP32 [ 1 ] optional: true"))


def tensor(name: str, *shape: int, datatype: str = "FP32") -> Tensor:
    return Tensor(name, datatype, np.zeros(shape, np.float32 if datatype == "FP32" else np.int32))


def a(*shape: int) -> Tensor:
    return tensor("A", *shape)


def b(*shape: int) -> Tensor:
    return tensor("B", *shape, datatype="INT32")


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            PLAIN,
            [a(4)],
            "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['A'], but missing required input(s) "
            "['B']. Please provide all required input(s).",
        ),
        (PLAIN, [a(4), tensor("WRONG", 1)], "unexpected inference input 'WRONG' for model 'm'"),
        (
            PLAIN,
            [a(4), b(1), tensor("Z", 1)],
            "expected 2 inputs but got 3 inputs for model 'm'. Got input(s) ['A','B','Z']",
        ),
        (
            OPTIONAL,
            [a(1)],
            "expected number of inputs between 2 and 3 but got 1 inputs for model 'm'. Got input(s) ['A'], ",
        ),
        (OPTIONAL, [a(1), tensor("C", 1)], "but missing required input(s) ['B']"),
        (PLAIN, [a(4), tensor("B", 1)], "inference input 'B' data-type is 'FP32', but model 'm' expects 'INT32'"),
        (PLAIN, [a(3), b(1)], "unexpected shape for input 'A' for model 'm'. Expected [4], got [3]. "),
        (PLAIN, [a(4), b(1, 1)], "unexpected shape for input 'B' for model 'm'. Expected [-1], got [1,1]. "),
        (BATCHED, [a(1, 3), b(1, 1)], f"for input 'A' for model 'm'. Expected [-1,4], got [1,3]. {BATCH_NOTE}"),
        (BATCHED, [a(5, 4), b(5, 1)], "inference request batch-size must be <= 4 for 'm'"),
        (BATCHED, [a(0, 4), b(0, 1)], "inference request batch-size must be >= 1 for 'm'"),
        (BATCHED, [a(2, 4), b(1, 1)], "input 'B' batch size does not match other inputs for 'm'"),
        (BATCHED, [a(), b(1, 1)], "input 'A' has no shape but model requires batch dimension for 'm'"),
    ],
)
def test_request_is_refused(model: ModelSignature, inputs: list[Tensor], message: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        model.check(request("m", *inputs, request_id="r1"))
    assert str(failure.value).startswith("[request id: r1] ")
    assert message in str(failure.value)


def test_unknown_output_is_refused_and_the_id_may_be_missing() -> None:
    with pytest.raises(InvalidArgument) as failure:
        PLAIN.check(request("m", a(4), b(1), requested_outputs=("C", "NOPE")))
    assert str(failure.value) == "[request id: <id_unknown>] unexpected inference output 'NOPE' for model 'm'"


def test_a_name_that_is_nearly_right_is_told_the_right_one() -> None:
    model = signature(tensors("input", text_input="FP32 [ 1 ]", stream="FP32 [ 1 ] optional: true"))
    with pytest.raises(InvalidArgument, match=r"input 'text_inptu' for model 'm'; did you mean 'text_input'\?"):
        model.check(request("m", tensor("text_inptu", 1)))
    with pytest.raises(InvalidArgument, match=r"for model 'm'$"):
        model.check(request("m", tensor("text_input" * 100, 1)))
    with pytest.raises(InvalidArgument) as failure:  # as many as there may be, but not those that there must be
        model.check(request("m", tensor("stream", 1)))
    assert str(failure.value).endswith(
        "not all required inputs for model 'm'. Got input(s) ['stream'], but missing required input(s) "
        "['text_input']. Please provide all required input(s)."
    )


@pytest.mark.parametrize(
    ("model", "inputs", "batch_size"),
    [(PLAIN, [a(4), b(9)], 1), (BATCHED, [a(3, 4), b(3, 2)], 3), (OPTIONAL, [a(1), tensor("B", 1)], 1)],
)
def test_fitting_request_passes(model: ModelSignature, inputs: list[Tensor], batch_size: int) -> None:
    good = request("m", *inputs)
    model.check(good)
    assert model.batch_size(good) == batch_size
    assert model.to_model(good) is good


@pytest.mark.parametrize(
    ("max_batch_size", "dims", "given", "seen"),
    [
        (8, "[ 1 ] reshape { shape: [ ] }", (3, 1), (3,)),
        (0, "[ 1 ] reshape { shape: [ ] }", (1,), ()),
        (0, "[ 4, 2 ] reshape { shape: [ 8 ] }", (4, 2), (8,)),
        (8, "[ -1, 4 ] reshape { shape: [ 2, -1, 2 ] }", (1, 5, 4), (1, 2, 5, 2)),
    ],
)
def test_reshape_both_ways(max_batch_size: int, dims: str, given: tuple[int, ...], seen: tuple[int, ...]) -> None:
    declared = tensors("input", X=f"FP32 {dims}") + tensors("output", X=f"FP32 {dims}")
    model = signature(f"max_batch_size: {max_batch_size} {declared}")
    data = np.arange(np.prod(given), dtype=np.float32).reshape(given)
    prepared = model.to_model(request("m", Tensor("X", "FP32", data))).inputs["X"]
    assert prepared.shape == seen
    (restored,) = model.from_model((prepared,), frozenset())
    np.testing.assert_array_equal(restored.data, data)


def outputs(model: ModelSignature, *wanted: str) -> list[str]:
    made: list[Any] = [tensor(name, 1) for name in ("C", "EXTRA", "A", "B")]
    return [output.name for output in model.from_model(tuple(made), frozenset(wanted))]


def test_outputs_come_in_the_order_of_the_config() -> None:
    model = signature(tensors("output", B="FP32 [ 1 ]", C="FP32 [ 1 ]", A="FP32 [ 1 ]"))
    assert outputs(model) == ["B", "C", "A"]
    assert outputs(model, "A", "B") == ["B", "A"]


def test_outputs_of_ensembles_come_alphabetically() -> None:
    model = signature(tensors("output", B="FP32 [ 1 ]", C="FP32 [ 1 ]", A="FP32 [ 1 ]") + "ensemble_scheduling { }")
    assert outputs(model) == ["A", "B", "C"]


def test_an_output_of_another_shape_passes_as_from_triton_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = signature(tensors("output", C="FP32 [ -1, -1, 4 ]", D="FP32 [ -1 ]"))
    outputs = (tensor("C", 8), tensor("D", 3))
    for _ in range(2):
        assert model.from_model(outputs, frozenset()) == outputs
    (line,) = caplog.messages
    assert line.startswith("model 'm' returned output 'C' of shape [8], which its config declares as [-1,-1,4];")


@pytest.mark.parametrize(("shape", "warnings"), [((3, 2, 4), 0), ((2, 4), 0), ((3, 8), 0), ((3, 4, 2), 1)])
def test_a_reshaped_output_is_compared_with_what_the_model_sees(
    shape: tuple[int, ...], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = signature(f"max_batch_size: 8 {tensors('output', C='FP32 [ 8 ] reshape { shape: [ 2, 4 ] }')}")
    model.from_model((Tensor("C", "FP32", np.zeros(shape, np.float32)),), frozenset())
    assert len(caplog.messages) == warnings
