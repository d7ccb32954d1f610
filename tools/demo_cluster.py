"""Runs a cluster on one machine: `make demo-cluster`. A worker is killed during an answer, and clients do not notice.

Four workers of one engine answer behind a front end of Dynamo, which distributes requests. A prompt is first answered
without interruption, then six times at once while a worker is killed: once greedily and once with sampling. Then
tritonclient asks the same workers through our server, with parameters that Dynamo's own front end does not accept.
"""

from __future__ import annotations

import itertools
import json
import queue
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from tools.cluster.local import LocalCluster

PROMPT = "Summarize:\nIf the key is in the dictionary, its value is returned; otherwise the default, which is None."
NEW_TOKENS, KILLED_AFTER, NUM_STREAMS = 160, 40, 6
STREAMED_TOKENS = 800  # enough to see which worker answers
ASKED: Mapping[str, Mapping[str, Any]] = {"greedy": {"temperature": 0}, "by chance": {"temperature": 1.0, "seed": 7}}
TENSORS: tuple[tuple[str, Any, Any], ...] = (
    ("text_input", PROMPT.encode(), np.object_), ("max_tokens", STREAMED_TOKENS, np.int32), ("stream", True, np.bool_),
    ("min_tokens", STREAMED_TOKENS, np.int32), ("temperature", 1.0, np.float32), ("seed", 7, np.uint64),
    ("presence_penalty", 0.5, np.float32), ("frequency_penalty", 0.2, np.float32),
)  # fmt: skip


def pieces(url: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the pieces of an answer as they arrive."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True, **fields}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield from (choice["text"] for choice in json.loads(line[len(b"data: ") :])["choices"])


def text_of(url: str, fields: Mapping[str, Any]) -> str:
    return "".join(pieces(url, fields))


def interrupted(cluster: LocalCluster, fields: Mapping[str, Any], worker: int) -> list[str]:
    """Returns simultaneous answers, enough for every worker. This one is killed, so its answers fail over."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        others = [pool.submit(text_of, cluster.url, fields) for _ in range(NUM_STREAMS - 1)]
        text = ""
        for number, piece in enumerate(pieces(cluster.url, fields)):
            text += piece
            if number == KILLED_AFTER:
                print(f"   token {number} of {NUM_STREAMS} answers: kill -9 of worker {worker}", flush=True)
                cluster.kill(worker)
        return [text, *(other.result() for other in others)]


def stream(url: str, killed: Callable[[], None] = lambda: None) -> str:
    """Returns the text of a stream as tritonclient reads it; `killed` is called in the middle."""
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: results.put(error or result))
        client.async_stream_infer("ensemble", [tensor(*each) for each in TENSORS], enable_empty_final_response=True)
        text, number, is_last = "", 0, False
        while not is_last:
            result = results.get(timeout=60)
            if isinstance(result, Exception):
                raise result
            is_last = result.get_response().parameters["triton_final_response"].bool_param
            if (piece := result.as_numpy("text_output")) is not None:
                text, number = text + piece.reshape(-1)[0].decode(), number + 1
            if number == KILLED_AFTER:
                number += 1
                killed()
    return text


def tensor(name: str, value: Any, dtype: Any) -> Any:
    made = triton.InferInput(name, [1, 1], np_to_triton_dtype(np.dtype(dtype)))
    made.set_data_from_numpy(np.array([[value]], dtype))
    return made


def streamed(cluster: LocalCluster, engine: Path) -> bool:
    """Runs a stream of tritonclient while the worker that answers it is killed."""
    server = cluster.add_server(engine)
    undisturbed = stream(server.grpc)
    print(f"== tritonclient, with penalties: {undisturbed[:70]!r} ... {STREAMED_TOKENS} tokens", flush=True)

    def kill() -> None:
        worker = next(number for number in itertools.cycle((2, 3)) if cluster.is_busy(number))
        print(f"   token {KILLED_AFTER}: kill -9 of worker {worker}, which answers it", flush=True)
        cluster.kill(worker)

    is_equal = stream(server.grpc, kill) == undisturbed
    print(f"   the answer is {'the undisturbed one, to the last token' if is_equal else 'ANOTHER ONE'}")
    return is_equal


def main(engine: str) -> int:
    is_equal = True
    with TemporaryDirectory(prefix="llmserve-cluster-") as folder:
        print("== a front end of Dynamo and four workers", flush=True)
        cluster = LocalCluster(Path(folder) / "cluster", Path(engine), num_workers=4, router="round-robin")
        try:
            for worker, (name, fields) in enumerate(ASKED.items()):
                undisturbed = text_of(cluster.url, fields)
                print(f"== {name}: {undisturbed[:70]!r} ... {NEW_TOKENS} tokens", flush=True)
                found = interrupted(cluster, fields, worker)
                num_equal = found.count(undisturbed)
                print(f"   {num_equal} of {len(found)} answers are the undisturbed one, to the last token")
                is_equal &= num_equal == len(found)
            is_equal &= streamed(cluster, Path(engine))
        finally:
            cluster.close()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
