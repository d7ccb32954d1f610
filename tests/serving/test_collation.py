"""Batches as one set of tensors: joined, ragged, with what `batch_input` derives, and divided again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InternalError
from llmserve.serving.collation import Collator
from llmserve.serving.config.scheduling import scheduling_problems
from llmserve.serving.types import InferRequest, Tensor
from tests.serving.models import request, tensors


def config(extra: str = "", max_batch_size: int = 8, dims: str = "[ -1 ]") -> ModelConfig:
    declared = tensors("input", X=f"FP32 {dims}", R=f"FP32 {dims} allow_ragged_batch: true optional: true")
    outputs = tensors("output", Y=f"FP32 {dims}", S=f"FP32 {dims}")
    text = f'name: "m" max_batch_size: {max_batch_size}\n{declared}\n{outputs}\n{extra}'
    parsed: ModelConfig = text_format.Parse(text, ModelConfig())
    return parsed


def derived(kind: str, data_type: str = "TYPE_INT32") -> str:
    return f'batch_input {{ kind: {kind} target_name: "N" data_type: {data_type} source_input: "R" }}'


def sample(name: str, *shape: int) -> Tensor:
    return Tensor(name, "FP32", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


def test_rows_are_joined_and_divided() -> None:
    requests = [request("m", sample("X", 2, 3)), request("m", sample("X", 1, 3))]
    batch = Collator(config()).collate(requests)
    assert batch.inputs["X"].data.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    first, second = batch.split([Tensor("Y", "FP32", batch.inputs["X"].data + 1)])
    assert first[0].data.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert second[0].data.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("BATCH_ELEMENT_COUNT", [3, 4, 5]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 7, 12]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 7, 12]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 5),
        ("BATCH_ITEM_SHAPE", [[3], [4], [5]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 4, 5]),
    ],
)
def test_ragged_inputs_become_one_row_and_their_places_an_input(kind: str, expected: Any) -> None:
    requests = [request("m", sample("R", 1, width)) for width in (3, 4, 5)]
    batch = Collator(config(derived(kind))).collate(requests)
    assert batch.inputs["R"].data.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert batch.inputs["N"].data.tolist() == expected
    assert batch.inputs["N"].data.dtype == np.int32


def test_item_shapes_have_a_row_for_each_element_of_the_batch() -> None:
    requests = [request("m", sample("R", 2, 3, 1)), request("m", sample("R", 1, 2, 2))]
    batch = Collator(config(derived("BATCH_ITEM_SHAPE", "TYPE_FP32"), dims="[ -1, -1 ]")).collate(requests)
    assert batch.inputs["N"].data.tolist() == [[3, 1], [3, 1], [2, 2]]
    assert batch.inputs["N"].datatype == "FP32"


def test_nothing_is_derived_from_an_absent_input() -> None:
    batch = Collator(config(derived("BATCH_ELEMENT_COUNT"))).collate([request("m", sample("X", 1, 1))])
    assert list(batch.inputs) == ["X"]


def test_outputs_are_scattered_in_the_shapes_of_an_input() -> None:
    scatter = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "S" source_input: "R" }'
    requests = [request("m", sample("R", 1, width)) for width in (1, 3)]
    batch = Collator(config(scatter)).collate(requests)
    first, second = batch.split([Tensor("S", "FP32", np.array([7, 1, 2, 3], np.float32))])
    assert (first[0].data.tolist(), second[0].data.tolist()) == ([[7]], [[1, 2, 3]])
    with pytest.raises(InternalError, match="3 elements of output 'S', but the shapes of input 'R' require 4"):
        batch.split([Tensor("S", "FP32", np.zeros(3, np.float32))])


def test_output_that_has_not_the_batch_dimension() -> None:
    batch = Collator(config()).collate([request("m", sample("X", 2, 1))])
    with pytest.raises(InternalError, match=r"batch of 2 with output 'Y' of shape \[3\]"):
        batch.split([Tensor("Y", "FP32", np.zeros(3, np.float32))])


def test_without_batching_everything_passes_through() -> None:
    batch = Collator(config(max_batch_size=0)).collate([request("m", sample("X", 2))])
    assert batch.inputs["X"].shape == (2,)
    ((output,),) = batch.split([sample("Y", 5)])
    assert output.shape == (5,)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_every_element_comes_back_to_its_request(shapes: list[tuple[int, int]]) -> None:
    scatter = 'batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "S" source_input: "R" }'
    requests: list[InferRequest] = []
    for number, (rows, width) in enumerate(shapes):
        fill = Tensor("R", "FP32", np.full((rows, width), number, np.float32))
        requests.append(request("m", fill, Tensor("X", "FP32", np.full((rows, 1), number, np.float32))))
    batch = Collator(config(scatter)).collate(requests)
    outputs = [
        Tensor("S", "FP32", batch.inputs["R"].data),
        Tensor("Y", "FP32", batch.inputs["X"].data),
    ]
    for given_request, (scattered, joined) in zip(requests, batch.split(outputs), strict=True):
        assert np.array_equal(scattered.data, given_request.inputs["R"].data)
        assert np.array_equal(joined.data, given_request.inputs["X"].data)


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ('batch_input { target_name: "N" data_type: TYPE_INT32 }', "source_input must name one input, got 0"),
        ('batch_input { target_name: "N" data_type: TYPE_INT32 source_input: "Q" }', "'Q' is not an input"),
        ('batch_input { target_name: "N" data_type: TYPE_FP64 source_input: "R" }', "TYPE_INT32 or TYPE_FP32"),
        (
            'batch_input { target_name: "X" data_type: TYPE_INT32 source_input: "R" }',
            "'X' is an input of the model, too",
        ),
        ('batch_input { data_type: TYPE_INT32 source_input: "R" }', "a batch_input has no target_name"),
        ('batch_output { target_name: "Q" source_input: "R" }', "'Q' is not an output of the model"),
        ('batch_output { source_input: "R" }', "a batch_output has no target_name"),
        (
            'output { name: "Z" data_type: TYPE_FP32 dims: [ 1, 1 ] } '
            'batch_output { target_name: "Z" source_input: "R" }',
            "'Z' and input 'R' have different numbers of dims",
        ),
    ],
)
def test_declaration_that_does_not_fit(extra: str, problem: str) -> None:
    (found,) = scheduling_problems(config(extra))
    assert problem in found


def test_ragged_batches_need_batches() -> None:
    problems = scheduling_problems(config(derived("BATCH_ELEMENT_COUNT"), max_batch_size=0))
    assert problems == [
        "input 'R': allow_ragged_batch needs max_batch_size of at least 1",
        "batch_input needs max_batch_size of at least 1",
    ]
