"""The ways in which tritonclient's own examples use a server: sync, async, streams, decoupled models, sequences, BYTES,
shared memory, model control, statistics. What the client hands to its user is compared."""

from __future__ import annotations

import asyncio
import queue
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, shared_memory

from tests.compat.observe import Case, Json
from tools.servers import Endpoint

TIMEOUT_S = 20
LEFT = np.arange(4, dtype=np.float32)[None]
RIGHT = np.full((1, 4), 10, dtype=np.float32)
BYTE_SIZE = LEFT.nbytes


def tensor(module: Any, name: str, data: np.ndarray[Any, Any]) -> Any:
    made = module.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    made.set_data_from_numpy(data)
    return made


def pair(module: Any) -> list[Any]:
    return [tensor(module, "INPUT0", LEFT), tensor(module, "INPUT1", RIGHT)]


def shown(result: Any, *names: str) -> Json:
    return {name: plain(result.as_numpy(name)) for name in names}


def plain(values: np.ndarray[Any, Any] | None) -> Json:
    if values is None:
        return None
    return [part.decode() if isinstance(part, bytes) else part for part in values.ravel().tolist()]


def clients(module: Any, endpoint: Endpoint) -> Any:
    return module.InferenceServerClient(endpoint.grpc if module is grpc_client else endpoint.http)


def sync(module: Any) -> Case:
    def run(endpoint: Endpoint) -> Json:
        with clients(module, endpoint) as client:
            wanted = [module.InferRequestedOutput("SUM"), module.InferRequestedOutput("DIFFERENCE")]
            result = client.infer("add_sub", pair(module), outputs=wanted, request_id="1")
            return shown(result, "SUM", "DIFFERENCE", "NOPE")

    return Case(run)


def strings(module: Any) -> Case:
    def run(endpoint: Endpoint) -> Json:
        with clients(module, endpoint) as client:
            data = np.array(["one", "zwölf", ""], dtype=object)
            return shown(client.infer("echo", [tensor(module, "IN_BYTES", data)]), "OUT_BYTES")

    return Case(run)


def refusal(module: Any) -> Case:
    def run(endpoint: Endpoint) -> Json:
        with clients(module, endpoint) as client:
            try:
                client.infer("add_sub", pair(module)[:1])
            except InferenceServerException as error:
                return {"status": error.status(), "message": error.message()}
        return "no error"

    return Case(run, gist="expected 2 inputs but got 1 inputs for model 'add_sub'")


def look_ups(module: Any) -> Case:
    def run(endpoint: Endpoint) -> Json:
        options = {} if module is http_client else {"as_json": True}
        with clients(module, endpoint) as client:
            metadata = client.get_model_metadata("add_sub", **options)
            config = client.get_model_config("add_sub", **options)
            statistics = client.get_inference_statistics("add_sub", **options)
            index = client.get_model_repository_index(**options)
            return {
                "live": client.is_server_live(),
                "ready": client.is_server_ready(),
                "model ready": client.is_model_ready("add_sub"),
                "inputs": [each["name"] for each in metadata["inputs"]],
                "max_batch_size": (config.get("config") or config)["max_batch_size"],
                "statistics of": statistics["model_stats"][0]["name"],
                "models": len(index if isinstance(index, list) else index["models"]) > 10,
            }

    return Case(run)


def http_async(endpoint: Endpoint) -> Json:
    with http_client.InferenceServerClient(endpoint.http, concurrency=4) as client:
        running = [client.async_infer("add_sub", pair(http_client)) for _ in range(4)]
        return [shown(one.get_result(timeout=TIMEOUT_S), "SUM") for one in running]


def http_compressed(endpoint: Endpoint) -> Json:
    with http_client.InferenceServerClient(endpoint.http) as client:
        options = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}
        return shown(client.infer("add_sub", pair(http_client), **options), "SUM")


def grpc_async(endpoint: Endpoint) -> Json:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc_client.InferenceServerClient(endpoint.grpc) as client:
        for _ in range(4):
            client.async_infer("add_sub", pair(grpc_client), lambda result, error: answers.put(error or result))
        return [shown(answers.get(timeout=TIMEOUT_S), "SUM") for _ in range(4)]


def with_asyncio(work: Callable[[Endpoint], Awaitable[Json]]) -> Case:
    async def bounded(endpoint: Endpoint) -> Json:
        async with asyncio.timeout(TIMEOUT_S):
            return await work(endpoint)

    return Case(lambda endpoint: asyncio.run(bounded(endpoint)))


async def aio_unary(endpoint: Endpoint) -> Json:
    async with grpc_aio.InferenceServerClient(endpoint.grpc) as client:
        results = await asyncio.gather(*(client.infer("add_sub", pair(grpc_client)) for _ in range(4)))
        return [shown(result, "SUM") for result in results]


async def aio_stream(endpoint: Endpoint) -> Json:
    async def requests() -> Any:
        for count in (2, 3):
            inputs = [tensor(grpc_client, "COUNT", np.array([count], dtype=np.int32))]
            yield {"model_name": "repeat", "inputs": inputs, "request_id": str(count)}

    seen: dict[str, list[Json]] = {"2": [], "3": []}
    async with grpc_aio.InferenceServerClient(endpoint.grpc) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            seen[result.get_response().id].append(shown(result, "INDEX"))
    return seen


@contextmanager
def streaming(endpoint: Endpoint) -> Iterator[tuple[Any, queue.SimpleQueue[Any]]]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc_client.InferenceServerClient(endpoint.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        yield client, answers
        client.stop_stream()


def decoupled(endpoint: Endpoint) -> Json:
    with streaming(endpoint) as (client, answers):
        count = tensor(grpc_client, "COUNT", np.array([4], dtype=np.int32))
        client.async_stream_infer("repeat", [count], enable_empty_final_response=True)
        return [shown(answers.get(timeout=TIMEOUT_S), "INDEX") for _ in range(5)]


def sequences(endpoint: Endpoint) -> Json:
    """Two sequences, in turn, on one stream."""
    with streaming(endpoint) as (client, answers):
        found = []
        for value, (start, end) in ((1, (True, False)), (2, (False, False)), (3, (False, True))):
            for sequence in (1001, 1002):
                x = tensor(grpc_client, "X", np.array([[value * (sequence - 1000)]], dtype=np.int32))
                flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
                client.async_stream_infer("state", [x], **flags)
                found.append(shown(answers.get(timeout=TIMEOUT_S), "SUM"))
        return found


def stream_errors(endpoint: Endpoint) -> Json:
    with streaming(endpoint) as (client, answers):
        count = tensor(grpc_client, "COUNT", np.array([1], dtype=np.int32))
        client.async_stream_infer("nope", [count])
        problem = answers.get(timeout=TIMEOUT_S)
        client.async_stream_infer("repeat", [count])
        return [problem.message(), shown(answers.get(timeout=TIMEOUT_S), "INDEX")]


def in_shared_memory(module: Any) -> Case:
    """Inputs and outputs, as `simple_*_shm_client.py`."""

    def run(endpoint: Endpoint) -> Json:
        key = f"/compat_{uuid.uuid4().hex}"
        region = shared_memory.create_shared_memory_region("compat", key, 4 * BYTE_SIZE)
        try:
            with clients(module, endpoint) as client:
                shared_memory.set_shared_memory_region(region, [LEFT, RIGHT])
                client.register_system_shared_memory("compat", key, 4 * BYTE_SIZE)
                inputs = [module.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
                outputs = [module.InferRequestedOutput(name) for name in ("SUM", "DIFFERENCE")]
                for place, each in enumerate((*inputs, *outputs)):
                    each.set_shared_memory("compat", BYTE_SIZE, offset=place * BYTE_SIZE)
                client.infer("add_sub", inputs, outputs=outputs)
                client.unregister_system_shared_memory("compat")
                found = [shared_memory.get_contents_as_numpy(region, np.float32, [8], offset=2 * BYTE_SIZE)]
                return [values.tolist() for values in found]
        finally:
            shared_memory.destroy_shared_memory_region(region)

    return Case(run)


def control(endpoint: Endpoint) -> Json:
    with http_client.InferenceServerClient(endpoint.http) as client:
        try:
            client.load_model("add_sub")
        except InferenceServerException as error:
            return [error.status(), error.message()]
    return "no error"


CASES: Mapping[str, Case] = {
    "HTTP, sync": sync(http_client),
    "HTTP, async": Case(http_async),
    "HTTP, compressed": Case(http_compressed),
    "HTTP, strings": strings(http_client),
    "HTTP, an error": refusal(http_client),
    "HTTP, look-ups": look_ups(http_client),
    "HTTP, shared memory": in_shared_memory(http_client),
    "HTTP, control": Case(control),
    "gRPC, sync": sync(grpc_client),
    "gRPC, async": Case(grpc_async),
    "gRPC, strings": strings(grpc_client),
    "gRPC, an error": refusal(grpc_client),
    "gRPC, look-ups": look_ups(grpc_client),
    "gRPC, shared memory": in_shared_memory(grpc_client),
    "gRPC, asyncio": with_asyncio(aio_unary),
    "gRPC, asyncio stream": with_asyncio(aio_stream),
    "gRPC, a decoupled model": Case(decoupled),
    "gRPC, sequences in a stream": Case(sequences),
    "gRPC, errors in a stream": Case(stream_errors),
}
