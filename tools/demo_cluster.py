"""A cluster on one machine: `make demo-cluster`. A worker is killed in mid-stream, and nobody who reads notices.

Behind a front end of Dynamo, which gives every worker its share, three workers answer with one engine. A question is
asked once undisturbed, and then six times at once while a worker is killed: greedily, and by chance.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.cluster.local import LocalCluster

PROMPT = "Summarize:\nIf the key is in the dictionary, its value is returned; otherwise the default, which is None."
NEW_TOKENS, KILLED_AFTER, NUM_STREAMS = 160, 40, 6
ASKED: Mapping[str, Mapping[str, Any]] = {"greedy": {"temperature": 0}, "by chance": {"temperature": 1.0, "seed": 7}}


def pieces(url: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Of an answer, as they come."""
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
    """Several answers at once, so that every worker has some; this one's go on elsewhere."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        others = [pool.submit(text_of, cluster.url, fields) for _ in range(NUM_STREAMS - 1)]
        text = ""
        for number, piece in enumerate(pieces(cluster.url, fields)):
            text += piece
            if number == KILLED_AFTER:
                print(f"   token {number} of {NUM_STREAMS} answers: kill -9 of worker {worker}", flush=True)
                cluster.kill(worker)
        return [text, *(other.result() for other in others)]


def main(engine: str) -> int:
    is_equal = True
    with TemporaryDirectory(prefix="llmserve-cluster-") as folder:
        print("== a front end of Dynamo and three workers", flush=True)
        cluster = LocalCluster(Path(folder) / "cluster", Path(engine), num_workers=3, router="round-robin")
        try:
            for worker, (name, fields) in enumerate(ASKED.items()):
                undisturbed = text_of(cluster.url, fields)
                print(f"== {name}: {undisturbed[:70]!r} ... {NEW_TOKENS} tokens", flush=True)
                found = interrupted(cluster, fields, worker)
                num_equal = found.count(undisturbed)
                print(f"   {num_equal} of {len(found)} answers are the undisturbed one, to the last token")
                is_equal &= num_equal == len(found)
        finally:
            cluster.close()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
