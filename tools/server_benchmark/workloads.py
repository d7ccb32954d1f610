"""Requests to a server, and measurements of its answers in a few seconds."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import psutil
from tritonclient.grpc import service_pb2

from tools.benchmark.statistics import quantile
from tools.server_benchmark.clients import (
    Client,
    EventClient,
    GrpcClient,
    HttpClient,
    StreamClient,
    Tally,
    grpc_headers,
    http_request,
)
from tools.server_benchmark.repository import TOKENS
from tools.servers import HOST, Endpoint

WARM_S = 0.5
FIRST_S = 60.0  # for the first answer: on a busy machine, a server may still import a wire's modules
DRAIN_S = 5.0  # for the last answers
POLL_S = 0.01
MakeClient = Callable[[Endpoint, Tally], Client]
ROW = np.arange(16, dtype=np.float32)
PROMPT = b"Tell me what this function returns."


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    num_clients: int
    connect: MakeClient
    uses_http: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one server under one workload."""

    answers_per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float  # of all its processes, per answer
    client_cpu_ms: float  # of this process, per answer: the limit for measuring a server's speed


def _infer_message(model: str) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[ROW.tobytes()])
    message.inputs.add(name="X", datatype="FP32", shape=[1, 16])
    data: bytes = message.SerializeToString()
    return data


def _stream_message() -> bytes:
    text = len(PROMPT).to_bytes(4, "little") + PROMPT
    message = service_pb2.ModelInferRequest(
        model_name="ensemble", raw_input_contents=[text, TOKENS.to_bytes(4, "little")]
    )
    message.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    message.inputs.add(name="COUNT", datatype="INT32", shape=[1, 1])
    data: bytes = message.SerializeToString()
    return data


def grpc_unary(model: str) -> MakeClient:
    message = _infer_message(model)
    return lambda endpoint, tally: GrpcClient(tally, grpc_headers(endpoint.grpc, "ModelInfer"), message)


def grpc_stream() -> MakeClient:
    message = _stream_message()
    return lambda endpoint, tally: StreamClient(tally, grpc_headers(endpoint.grpc, "ModelStreamInfer"), message)


def http_unary(model: str) -> MakeClient:
    """Requests like tritonclient's by default: binary tensors in both directions."""
    given = {"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": ROW.nbytes}}
    header = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    path, length = f"/v2/models/{model}/infer", str(len(header))
    return lambda endpoint, tally: HttpClient(
        tally, http_request(endpoint.http, path, header + ROW.tobytes(), Inference_Header_Content_Length=length)
    )


def events() -> MakeClient:
    body = json.dumps({"TEXT": PROMPT.decode(), "COUNT": TOKENS}).encode()
    path = "/v2/models/ensemble/generate_stream"
    return lambda endpoint, tally: EventClient(tally, http_request(endpoint.http, path, body))


UNARY = tuple(
    Workload(f"{what}, {protocol}, {count} client{'s' if count > 1 else ''}", count, connect(model), protocol == "HTTP")
    for what, model in (("identity", "identity"), ("identity declared brief", "brief_identity"))
    for protocol, connect in (("gRPC", grpc_unary), ("HTTP", http_unary))
    for count in (1, 8, 32)
)
STREAMS = (
    Workload("ensemble of three steps, gRPC, 32 streams", 32, grpc_stream()),
    Workload("ensemble of three steps, SSE, 32 streams", 32, events(), uses_http=True),
)
SLOW = tuple(
    Workload(f"slow model, {what}, gRPC, 32 clients", 32, grpc_unary(model))
    for what, model in (("as it is", "slow"), ("dynamic batching", "slow_batched"), ("4 instances", "slow_instances"))
)
WORKLOADS = (*UNARY, *STREAMS, *SLOW)


class NoAnswer(RuntimeError):
    """There was no failure, but also no answer."""


def measure(workload: Workload, endpoint: Endpoint, seconds: float) -> Measured:
    """Raises `RuntimeError` if a request fails."""
    tally, cpu_s, own_cpu_s, elapsed = asyncio.run(_run(workload, endpoint, seconds))
    if tally.failures:
        raise RuntimeError(tally.failures[0])
    if not tally.num_answers:
        raise NoAnswer("no answer")
    milliseconds = [1e3 * latency for latency in tally.latencies] or [math.nan]
    return Measured(
        tally.num_answers / elapsed,
        quantile(milliseconds, 0.5),
        quantile(milliseconds, 0.99),
        1e3 * cpu_s / tally.num_answers,
        1e3 * own_cpu_s / tally.num_answers,
    )


async def _run(workload: Workload, endpoint: Endpoint, seconds: float) -> tuple[Tally, float, float, float]:
    """Returns the results, the server's CPU time, our own, and the elapsed time, in seconds."""
    loop, tally = asyncio.get_running_loop(), Tally()
    port = endpoint.http_port if workload.uses_http else endpoint.grpc_port
    pairs = [
        await loop.create_connection(lambda: workload.connect(endpoint, tally), HOST, port)
        for _ in range(workload.num_clients)
    ]
    await asyncio.sleep(WARM_S)
    tally.num_answers = 0
    tally.latencies.clear()
    started, own_before, cpu_before = time.perf_counter(), time.process_time(), cpu_seconds(endpoint.pid)
    await asyncio.sleep(seconds)
    for _ in range(round(FIRST_S / POLL_S)):
        if tally.num_answers or tally.failures:
            break
        await asyncio.sleep(POLL_S)
    cpu_s, own_cpu_s = cpu_seconds(endpoint.pid) - cpu_before, time.process_time() - own_before
    elapsed = time.perf_counter() - started
    seen = replace(tally, latencies=tally.latencies.copy())  # answers from here on count only if they fail
    for _, client in pairs:
        client.stopped = True
    with suppress(TimeoutError):  # the next measurement must not begin with remaining answers
        async with asyncio.timeout(0 if tally.failures else DRAIN_S):
            await asyncio.gather(*(client.idle.wait() for _, client in pairs))
    for transport, _ in pairs:
        transport.abort()
    return seen, cpu_s, own_cpu_s, elapsed


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its child processes."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def choose(names: Sequence[str]) -> list[Workload]:
    """Workloads whose name contains one of `names`; all if there are none."""
    return [one for one in WORKLOADS if not names or any(name in one.name for name in names)]
