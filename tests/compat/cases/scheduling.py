"""Batches, queues and sequences: who runs with whom, who waits, who is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tritonclient.grpc.service_pb2 import InferParameter

from tests.compat.observe import Case, Json, grpc_call, http_call, infer_message, post, raw_input, stream
from tools.servers import Endpoint

BETWEEN_S = 0.03  # between requests whose order counts
IDLE_S = 1.6  # longer than a sequence may be idle


def tensor(name: str, *values: int) -> dict[str, Any]:
    return {"name": name, "datatype": "INT32", "shape": [len(values), 1], "data": list(values)}


def slow(endpoint: Endpoint, milliseconds: int = 1, *, model: str = "slow", rows: int = 1, **parameters: Any) -> Json:
    """How it was answered: the number of requests in its batch, or the error; and whether that took long."""
    shape = [1] if model == "direct" else [rows, 1]
    given = {"name": "MILLISECONDS", "datatype": "INT32", "shape": shape, "data": [milliseconds] * rows}
    started = time.monotonic()
    answer = http_call(endpoint, "POST", f"/v2/models/{model}/infer", {"inputs": [given], "parameters": parameters})
    waited = time.monotonic() - started > 0.2
    body = answer["body"]
    what = body["error"] if "error" in body else body["outputs"][0]["data"][0]
    return {"status": answer["status"], "answer": what, "waited": waited}


def together(*requests: Callable[[Endpoint], Json]) -> Case:
    """One after the other, without waiting for the answers, which are put in order."""

    def run(endpoint: Endpoint) -> Json:
        with ThreadPoolExecutor(len(requests)) as pool:
            running = []
            for request in requests:
                running.append(pool.submit(request, endpoint))
                time.sleep(BETWEEN_S)
            answers = [one.result() for one in running]
        return sorted(answers, key=lambda answer: (answer["status"], str(answer["answer"])))

    return Case(run, num_tries=5)


def request(milliseconds: int = 1, **fields: Any) -> Callable[[Endpoint], Json]:
    return lambda endpoint: slow(endpoint, milliseconds, **fields)


BATCHING = {
    "alone, after the delay": together(request()),
    "the preferred size, at once": together(*[request()] * 4),
    "the smaller of two preferred sizes, at once": together(*[request(model="sizes")] * 4),
    "one request of the preferred size": together(request(rows=4)),
    "three, after the delay": together(*[request()] * 3),
    "without batching, one by one": together(*[request(250, model="direct")] * 3),
    "a full queue": together(request(700, rows=8), *[request(rows=1)] * 9),
    "a timeout in the queue": together(request(900, rows=8), request(timeout=50_000), request(rows=4)),
    "a longer timeout": together(request(500, rows=8), request(timeout=20_000_000, rows=4)),
}


def steps(*requests: tuple[int, str], model: str = "sequence", sequence: Any = 7) -> Callable[[Endpoint], Json]:
    """Requests of one sequence, each a value and its flags: s starts, e ends."""

    def run(endpoint: Endpoint) -> Json:
        return [step(endpoint, model, sequence, value, flags) for value, flags in requests]

    return run


def step(endpoint: Endpoint, model: str, sequence: Any, value: int, flags: str) -> Json:
    parameters = {"sequence_id": sequence, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
    body = {"inputs": [tensor("X", value)], "parameters": parameters}
    answer = http_call(endpoint, "POST", f"/v2/models/{model}/infer", body)
    found = answer["body"]
    outputs = {each["name"]: each["data"] for each in found["outputs"]} if "outputs" in found else found
    return {"status": answer["status"], "answer": outputs}


def text_id(endpoint: Endpoint) -> Json:
    """The number that the model is told is each server's own."""
    answers = [step(endpoint, "sequence", "abc", value, flags) for value, flags in ((1, "s"), (2, "e"))]
    return [[answer["status"], answer["answer"].get("SUM")] for answer in answers]


def interleaved(endpoint: Endpoint) -> Json:
    """Two sequences, in turn."""
    order: Sequence[tuple[int, int, str]] = (
        (1, 1, "s"), (2, 10, "s"), (1, 2, ""), (2, 20, ""), (1, 3, "e"), (2, 30, "e"),
    )  # fmt: skip
    return [step(endpoint, "state", sequence, value, flags)["answer"]["SUM"] for sequence, value, flags in order]


def idle(endpoint: Endpoint) -> Json:
    """A sequence that has not been heard of for too long is over."""
    first = step(endpoint, "sequence", 31, 1, "s")
    time.sleep(IDLE_S)
    return [first, step(endpoint, "sequence", 31, 1, "")]


def by_stream(sequence: InferParameter) -> Callable[[Endpoint], Json]:
    def message(value: int, **flags: bool) -> Any:
        parameters = {name: InferParameter(bool_param=flag) for name, flag in flags.items()}
        return infer_message(
            "sequence",
            [raw_input("X", "INT32", [1, 1])],
            raw_input_contents=[value.to_bytes(4, "little")],
            parameters={"sequence_id": sequence, **parameters},
            id="s",
        )

    return stream(message(5, sequence_start=True), message(6), message(7, sequence_end=True))


def without_id(endpoint: Endpoint) -> Json:
    message = infer_message("sequence", [raw_input("X", "INT32", [1, 1])], raw_input_contents=[b"\1\0\0\0"])
    return grpc_call(endpoint, "ModelInfer", message)


SEQUENCES = {
    "a sequence": Case(steps((1, "s"), (2, ""), (3, "e"))),
    "a sequence of one": Case(steps((5, "se"))),
    "a sequence that starts again": Case(steps((1, "s"), (2, ""), (10, "s"), (1, "e"))),
    "an id that is text for a model that wants numbers": Case(text_id),
    "an id that is text": Case(steps((1, "s"), (2, "e"), model="state", sequence="abc")),
    "oldest": Case(steps((1, "s"), (2, ""), (3, "e"), model="state")),
    "two sequences in turn": Case(interleaved),
    "no start": Case(steps((1, ""), sequence=901)),
    "after the end": Case(steps((1, "se"), (2, ""), sequence=902)),
    "no id": Case(steps((1, "s"), sequence=0)),
    "no id over gRPC": Case(without_id),
    "an idle sequence": Case(idle),
    "a sequence in a stream": Case(by_stream(InferParameter(int64_param=55))),
}


def countdown(count: int, request_id: str, **parameters: InferParameter) -> Any:
    given = [raw_input("COUNT", "INT32", [1, 1])]
    raw = [count.to_bytes(4, "little")]
    return infer_message("countdown", given, raw_input_contents=raw, id=request_id, parameters=parameters)


def again(count: int, **parameters: Any) -> Case:
    body = {"inputs": [tensor("COUNT", count)], "parameters": parameters}
    return Case(lambda endpoint: http_call(endpoint, "POST", "/v2/models/again/infer", body))


ITERATIVE = {
    "run again, three times": Case(stream(countdown(3, "a"))),
    "run again, several requests": Case(stream(*(countdown(n, f"r{n}") for n in (4, 1, 6)))),
    "run again, in events": Case(post("/v2/models/countdown/generate_stream", {"COUNT": 3})),
    "run again, an id and no start": Case(stream(countdown(2, "a", sequence_id=InferParameter(int64_param=77)))),
    "run again, not decoupled": again(3),
    "run once": again(1),
    "run again, a sequence that is named": again(2, sequence_id=5, sequence_start=True),
    "run again, a sequence that has not started": again(2, sequence_id=6),
}
CASES: Mapping[str, Case] = {**BATCHING, **SEQUENCES, **ITERATIVE}
