"""Texts that would be tokenized for seconds, and lists that belong to them, over both wires."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

import grpc
import pytest
from tritonclient.grpc import service_pb2

from llmserve.stages.bpe_tokenizer import JsonTokenizer
from tests.hostile.attacks import field, post, rpc, send, status, works
from tests.hostile.conftest import ANY_LENGTH, EACH_BYTES, IS_STRICT, MAX_SEQ_LEN, MIB, Target

TEXT_BYTES = (60 if IS_STRICT else 6) * MIB
NUM_WORDS = 1_000_000 if IS_STRICT else 100_000
NUM_BIASES = 14_000_000 if IS_STRICT else 1_000_000
Inputs: TypeAlias = Mapping[str, tuple[str, int, bytes]]  # datatype, number of values, raw contents


def texts(*values: bytes) -> tuple[str, int, bytes]:
    return "BYTES", len(values), b"".join(struct.pack("<I", len(value)) + value for value in values)


def messages(content: bytes) -> tuple[str, int, bytes]:
    return texts(b'[{"role": "user", "content": "%b"}]' % content)


KEYS = b"{%b}" % b",".join(b'"%d":1' % number for number in range(NUM_WORDS))
ONE = {"QUERY": texts(b"x")}
ATTACKS: dict[str, Callable[[], Inputs]] = {
    "one word": lambda: {"QUERY": texts(b"x" * TEXT_BYTES)},
    "many words": lambda: {"QUERY": texts(b"a b " * (TEXT_BYTES // 4))},
    "a message": lambda: {"MESSAGES": messages(b"a b " * (3 * MIB // 4))},
    "a large message": lambda: {"MESSAGES": messages(b"a b " * (TEXT_BYTES // 4))},
    "messages that are none": lambda: {"MESSAGES": texts(b"[%b1]" % (b"{}," * (2 * MIB)))},
    "keys": lambda: {**ONE, "CHAT_TEMPLATE_KWARGS": texts(KEYS)},
    "stop words": lambda: {**ONE, "STOP_WORDS_DICT": texts(*[b"x"] * NUM_WORDS)},
    "a stop word": lambda: {**ONE, "STOP_WORDS_DICT": texts(b"x" * TEXT_BYTES)},
    "biases": lambda: {
        **ONE,
        "LOGIT_BIAS_IDS": ("INT32", NUM_BIASES, bytes(4 * NUM_BIASES)),
        "LOGIT_BIAS_WEIGHTS": ("FP32", NUM_BIASES, bytes(4 * NUM_BIASES)),
    },
}  # fmt: skip


def over_http(target: Target, inputs: Inputs, model: str = "preprocessing") -> bytes:
    listed = [
        {"name": name, "datatype": datatype, "shape": [1, count], "parameters": {"binary_data_size": len(data)}}
        for name, (datatype, count, data) in inputs.items()
    ]
    head = json.dumps({"inputs": listed}).encode()
    body = head + b"".join(data for _, _, data in inputs.values())
    return send(target.http_port, post(model, body, f"Inference-Header-Content-Length: {len(head)}"))


def over_grpc(target: Target, inputs: Inputs, model: str = "preprocessing") -> grpc.StatusCode:
    tensor = service_pb2.ModelInferRequest.InferInputTensor
    request = service_pb2.ModelInferRequest(
        model_name=model,
        inputs=[
            tensor(name=name, datatype=datatype, shape=[1, count]) for name, (datatype, count, _) in inputs.items()
        ],
    )
    message = request.SerializeToString() + b"".join(field(7, data) for _, _, data in inputs.values())
    return rpc(target.grpc_port, message)


@pytest.mark.parametrize("what", ATTACKS)
def test_what_is_too_much(target: Target, what: str) -> None:
    length = {"REQUEST_OUTPUT_LEN": ("INT32", 1, struct.pack("<i", 1))}
    inputs = {**ATTACKS[what](), **length}
    with target.watched():
        answer = over_http(target, inputs)
        code = over_grpc(target, inputs)
    assert status(answer) in (400, 413), answer[:300]
    assert len(answer) < 20_000
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert works(target.http_port, target.grpc_port)
    assert status(over_http(target, {**ONE, **length})) == 200


def test_a_text_that_may_fit_is_tokenized(target: Target) -> None:
    """And found too long by nobody but the engine."""
    inputs = {"QUERY": texts(b"x" * MAX_SEQ_LEN), "REQUEST_OUTPUT_LEN": ("INT32", 1, struct.pack("<i", 1))}
    assert status(over_http(target, inputs)) == 200


def test_what_tokenizing_takes_is_counted(target: Target) -> None:
    """A text that no limit of a length refuses, and whose tokens take more than a request may."""
    length = {"REQUEST_OUTPUT_LEN": ("INT32", 1, struct.pack("<i", 1))}
    fits = EACH_BYTES // JsonTokenizer.memory_per_byte  # bytes of text, as they are counted
    large, small = ({"QUERY": texts(b"a b " * (count // 4)), **length} for count in (3 * fits // 2, fits // 2))
    answer = over_http(target, large, ANY_LENGTH)
    assert status(answer) == 413
    assert b"the request takes more than %d bytes of memory" % EACH_BYTES in answer
    assert over_grpc(target, large, ANY_LENGTH) is grpc.StatusCode.RESOURCE_EXHAUSTED
    for _ in range(4):  # what one has taken is given back
        assert status(over_http(target, small, ANY_LENGTH)) == 200
