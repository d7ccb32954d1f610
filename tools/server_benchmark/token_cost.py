"""Measures the cost of a streamed token in the shipped pipelines, by stage (`shipped.py`), each in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tritonclient.grpc import service_pb2

from llmserve.frontends.shared.raw_tensors import encode_tensor
from tools.server_benchmark.clients import ChatClient, EventClient, StreamClient, Tally, grpc_headers, http_request
from tools.server_benchmark.repository import TOKENS
from tools.server_benchmark.shipped import ensemble_request, prompt
from tools.server_benchmark.workloads import Workload, measure
from tools.servers import Endpoint

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 30
WARM_S, COUNTING_S = 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one token in all threads of the server's process; calls exclude the fake engine."""

    stage: str
    num_streams: int
    cpu_us: float
    calls: float


def token_costs(num_streams: int, seconds: float) -> Iterator[Cost]:
    for stage, text in (("engine", "engine"), ("stages", "+ stages"), ("ensemble", "+ ensemble")):
        found = _in_process(stage, num_streams, seconds)
        yield Cost(text, num_streams, found["cpu_us"], found["calls"])
    for text, wire, workload in (
        ("+ gRPC", "llmserve", _grpc(num_streams)),
        ("+ SSE", "llmserve", _events(num_streams)),
        ("+ OpenAI's chat", "llmserve", _chats(num_streams)),
        ("+ gRPC by grpcio's server", "grpcio", _grpc(num_streams)),
    ):
        yield _on_the_wire(text, wire, workload, seconds)


def _in_process(stage: str, num_streams: int, seconds: float) -> dict[str, float]:
    output = subprocess.run(
        [*_program(stage), "--streams", str(num_streams), "--seconds", str(seconds)],
        cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def _on_the_wire(stage: str, wire: str, workload: Workload, seconds: float) -> Cost:
    with _served(wire) as (_, endpoint):
        cpu_us = 1e3 * measure(workload, endpoint, seconds).server_cpu_ms
    with _served(wire, "--count-calls") as (process, endpoint):
        measure(workload, endpoint, WARM_S)  # work that only the first requests cause
        before = _counted(process)
        measure(workload, endpoint, COUNTING_S)
        after = _counted(process)
    calls = (after["calls"] - before["calls"]) / (after["tokens"] - before["tokens"])
    return Cost(stage, workload.num_clients, cpu_us, calls)


def _counted(process: subprocess.Popen[str]) -> dict[str, float]:
    process.send_signal(signal.SIGUSR1)
    return _said(process)


def _said(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the server ended with code {process.wait()}")
    said: dict[str, float] = json.loads(line)
    return said


@contextmanager
def _served(wire: str, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    command = [*_program("serve"), "--wire", wire, *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            ports = _said(process)
            yield process, Endpoint(ROOT, int(ports["http_port"]), int(ports["grpc_port"]), 0, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _program(stage: str) -> Sequence[str]:
    return (sys.executable, "-m", "tools.server_benchmark.shipped", stage)


def _grpc(num_streams: int) -> Workload:
    prompts = map(prompt, count())

    def connect(endpoint: Endpoint, tally: Tally) -> StreamClient:
        message = service_pb2.ModelInferRequest(model_name="ensemble")
        for name, tensor in ensemble_request(next(prompts)).inputs.items():
            message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
            message.raw_input_contents.append(encode_tensor(tensor))
        headers = grpc_headers(endpoint.grpc, "ModelStreamInfer")
        return StreamClient(tally, headers, message.SerializeToString())

    return Workload("shipped ensemble, gRPC", num_streams, connect)


def _events(num_streams: int) -> Workload:
    prompts = map(prompt, count())

    def connect(endpoint: Endpoint, tally: Tally) -> EventClient:
        values = {"text_input": next(prompts), "max_tokens": TOKENS, "end_id": -1, "stream": True}
        path = "/v2/models/ensemble/generate_stream"
        return EventClient(tally, http_request(endpoint.http, path, json.dumps(values).encode()))

    return Workload("shipped ensemble, SSE", num_streams, connect, uses_http=True)


def _chats(num_streams: int) -> Workload:
    prompts = map(prompt, count())

    def connect(endpoint: Endpoint, tally: Tally) -> ChatClient:
        values = {
            "model": "ensemble", "messages": [{"role": "user", "content": next(prompts)}], "max_tokens": TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        request = http_request(endpoint.http, "/v1/chat/completions", json.dumps(values).encode())
        return ChatClient(tally, request, TOKENS)

    return Workload("shipped ensemble, OpenAI's chat", num_streams, connect, uses_http=True)
