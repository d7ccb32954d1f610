"""ModelStreamInfer, generate and generate_stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc.service_pb2 import InferParameter

from tests.compat.cases.grpc import LEFT, RIGHT, ROW
from tests.compat.observe import Case, Json, Message, bytes_element, ends, infer_message, post, raw_input, stream

EMPTY_FINAL = {"triton_enable_empty_final_response": InferParameter(bool_param=True)}


def repeat(count: int, how: str = "", request_id: str = "a", *, model: str = "repeat", final: bool = False) -> Message:
    inputs, raw = [raw_input("COUNT", "INT32", [1])], [count.to_bytes(4, "little")]
    if how:
        inputs.append(raw_input("HOW", "BYTES", [1]))
        raw.append(bytes_element(how.encode()))
    parameters = EMPTY_FINAL if final else {}
    return infer_message(model, inputs, raw_input_contents=raw, id=request_id, parameters=parameters)


def sent(count: int, how: str = "") -> Message:
    return repeat(count, how, model="sender")


def add_sub(request_id: str, **fields: Any) -> Message:
    return infer_message("add_sub", [LEFT, RIGHT], **{"raw_input_contents": [ROW, ROW], "id": request_id, **fields})


def generate(model: str, **members: Json) -> Case:
    return Case(post(f"/v2/models/{model}/generate", members))


def events(model: str, **members: Json) -> Case:
    return Case(post(f"/v2/models/{model}/generate_stream", members))


STREAMS = {
    "three responses": Case(stream(repeat(3))),
    "three responses and an empty final one": Case(stream(repeat(3, final=True))),
    "the final flag with the last response": Case(stream(repeat(2, "with last"))),
    "the final flag with the last response, empty final wanted": Case(stream(repeat(2, "with last", final=True))),
    "no response": Case(stream(repeat(0))),
    "no response and an empty final one": Case(stream(repeat(0, final=True))),
    "many requests": Case(stream(*(repeat(4 + n, request_id=f"r{n}", final=True) for n in range(6)))),
    "an error in the middle": Case(stream(repeat(3, "error in the middle", final=True))),
    "an error at the end": Case(stream(repeat(1, "error at the end", final=True))),
    "a model that raises": Case(stream(repeat(1, "raise", final=True))),
    "a model that is not decoupled": Case(stream(add_sub("u"))),
    "a model that is not decoupled, empty final wanted": Case(stream(add_sub("u", parameters=EMPTY_FINAL))),
    "a bad request and a good one": Case(stream(add_sub("bad", raw_input_contents=[ROW]), add_sub("good"))),
    "an unknown model and a good request": Case(
        stream(infer_message("nope", [LEFT], raw_input_contents=[ROW], id="bad"), add_sub("good"))
    ),
    "an unexpected input": Case(
        stream(infer_message("add_sub", [LEFT, raw_input("X", "FP32", [1, 4])], raw_input_contents=[ROW, ROW], id="b"))
    ),
    "an empty final response of the wrong type": Case(
        stream(add_sub("x", parameters={"triton_enable_empty_final_response": InferParameter(int64_param=1)}))
    ),
    "an ensemble with a decoupled step": Case(ends(stream(repeat(3, model="stream", final=True)))),
    "an ensemble of no responses": Case(ends(stream(repeat(0, model="stream", final=True)))),
    "an ensemble whose later step fails": Case(ends(stream(repeat(15, "slow", model="stream", final=True)))),
    "an ensemble whose first step raises": Case(ends(stream(repeat(15, "raise", model="stream", final=True)))),
    "no request": Case(stream()),
    "a model that raises, as the status": Case(stream(repeat(1, "raise"), errors_as_status="true")),
    "a bad request and a good one, errors as status": Case(
        stream(add_sub("bad", raw_input_contents=[ROW]), add_sub("good"), errors_as_status="true")
    ),
    "errors as status in other words": Case(stream(repeat(0, "error at the end"), errors_as_status="True")),
    "a model without inputs": Case(stream(infer_message("no_input", [], id="n"))),
    "a sender of a unary model, no response": Case(stream(sent(0))),
    "a sender of a unary model": Case(stream(sent(1, "with last"))),
    "a sender of a unary model, two responses": Case(stream(sent(2))),
}
GENERATE = {
    "generate": generate("twice", X=4),
    "generate with an id": generate("twice", X=4, id="g"),
    "generate with a list": generate("one", X=[1, 2]),
    "generate with a batch": generate("describe", X=5, text="a", number=7, flag=True, real=1.5),
    "generate with nested parameters": generate("describe", X=5, parameters={"text": "a", "number": 7}),
    "generate with an ensemble": generate("ensemble", LEFT=[1, 2, 3, 4], RIGHT=[1, 1, 1, 1]),
    "generate with one response of a decoupled model": generate("repeat", COUNT=1),
    "generate with three responses": generate("repeat", COUNT=3),
    "generate with no response": generate("repeat", COUNT=0),
    "generate with an error": generate("twice", X=13),
    "generate with a model that raises": generate("fail", HOW="raise"),
    "generate with an object for an input": generate("twice", X={}),
    "generate with null for an input": generate("twice", X=None),
    "generate with an input twice": Case(post("/v2/models/twice/generate", b'{"X": 4, "X": 5}')),
    "generate with a list for an object": Case(post("/v2/models/twice/generate", b"[]")),
    "generate without inputs": generate("no_input"),
    "generate with a sender of a unary model": generate("sender", COUNT=1),
    "generate with an object for a parameter": generate("describe", X=5, foo={}),
    "generate with a list for a parameter": generate("describe", X=5, foo=[1]),
    "generate with null for a parameter": generate("describe", X=5, foo=None),
    "generate with an object in its parameters": generate("describe", X=5, parameters={"b": {}}),
    "generate with text for an integer": generate("twice", X="4"),
    "generate with a fraction for an integer": generate("twice", X=1.5),
    "generate with an integer for a float": generate("ensemble", LEFT=[1, 2, 3, 4], RIGHT=[1.5, 1, 1, 1]),
    "generate with text for BOOL": generate("echo", IN_BOOL="true"),
    "generate without its input": generate("twice"),
    "generate with an unknown model": generate("nope", X=1),
    "generate that is not JSON": Case(
        post("/v2/models/twice/generate", b"{x"), gist="failed to parse the request JSON buffer: "
    ),
    "events": events("repeat", COUNT=3),
    "events with an id": events("repeat", COUNT=2, id="g"),
    "events of none": events("repeat", COUNT=0),
    "events with the final flag on the last": events("repeat", COUNT=2, HOW="with last"),
    "events with an error in the middle": events("repeat", COUNT=3, HOW="error in the middle"),
    "events with an error at first": events("repeat", COUNT=0, HOW="error at the end"),
    "events of a model that raises": events("repeat", COUNT=1, HOW="raise"),
    "events of a model that is not decoupled": events("twice", X=4),
    "events of an ensemble": events("stream", COUNT=3),
    "events of an ensemble whose later step fails": events("stream", COUNT=15, HOW="slow"),
    "events without the input": events("repeat"),
    "events of an unknown model": events("nope", X=1),
}
CASES: Mapping[str, Case] = {**STREAMS, **GENERATE}
