"""Measures the gain of routing by cached prefixes: four workers of one engine, and prompts with shared beginnings.

    python -m tools.bench_cluster ENGINE [--prefixes 16] [--prefix-words 200] [--pool-tokens 1536] [--requests 160]

All prefixes together need several times the size of one worker's KV cache. The same requests go, in turn, to a front
end that routes by cached prefixes and to one that uses workers round-robin, each with its own workers. The results are
the time until the first piece of an answer at the client, and the workers' cache metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from llmserve.benchmark.workload import WORDS
from llmserve.engine.machine.description import machine_name
from tools.benchmark.markdown import table
from tools.benchmark.statistics import quantile
from tools.cluster.local import LocalCluster

NUM_WORKERS, NUM_USERS, NEW_TOKENS, NUM_WORDS = 4, 2, 4, 12
ROUTERS = ("kv", "round-robin")


class Measured(NamedTuple):
    median_ms: float  # until the first piece
    p99_ms: float
    hit_rate: float  # of blocks, over all workers


def first_piece_s(url: str, prompt: str) -> float:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began, first = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not first and line.startswith(b"data: {"):
                first = time.perf_counter() - began
    return first


def hit_rate(cluster: LocalCluster) -> float:
    """The workers' hit rates, weighted by their numbers of requests."""
    found = [(value_of(cluster.metrics(number), "dynamo_component_kv_cache_hit_rate"),
              value_of(cluster.metrics(number), "dynamo_component_requests_total"))
             for number in range(NUM_WORKERS)]  # fmt: skip
    return sum(rate * count for rate, count in found) / sum(count for _, count in found)


def value_of(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name) and "worker_kv" not in line]
    return sum(float(line.split()[-1]) for line in lines)


def measure(engine: Path, router: str, prompts: Sequence[str], pool_tokens: int) -> Measured:
    """Measures one router. The first quarter of the prompts is not counted, because caches are empty."""
    with TemporaryDirectory(prefix="llmserve-cluster-") as folder:
        flags = ("--max-kv-tokens", str(pool_tokens))
        cluster = LocalCluster(
            Path(folder) / "cluster", engine, num_workers=NUM_WORKERS, router=router, worker_flags=flags
        )
        try:
            with ThreadPoolExecutor(NUM_USERS) as users:
                times = list(users.map(lambda prompt: first_piece_s(cluster.url, prompt), prompts))
            time.sleep(1)  # until workers have published their metrics
            counted = [1e3 * seconds for seconds in times[len(times) // 4 :]]
            return Measured(statistics.median(counted), quantile(counted, 0.99), hit_rate(cluster))
        finally:
            cluster.close()


def make_prompts(num_prefixes: int, prefix_words: int, count: int) -> list[str]:
    """Prompts, each with one of the shared prefixes and its own words."""
    chance = random.Random(0)

    def words(number: int) -> str:
        return " ".join(chance.choices(WORDS, k=number))

    prefixes = [words(prefix_words) for _ in range(num_prefixes)]
    return [f"{chance.choice(prefixes)} {words(NUM_WORDS)}" for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix-words", type=int, default=200)
    parser.add_argument("--pool-tokens", type=int, default=1536, help="of each worker's KV cache")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    prompts = make_prompts(given.prefixes, given.prefix_words, given.requests)
    found: dict[str, list[Measured]] = {router: [] for router in ROUTERS}
    for number in range(given.rounds):
        for router in ROUTERS if number % 2 == 0 else ROUTERS[::-1]:
            found[router].append(measure(given.engine, router, prompts, given.pool_tokens))
            print(router, found[router][-1], flush=True)
    middle = {
        router: [statistics.median(values) for values in zip(*each, strict=True)] for router, each in found.items()
    }
    rows = [[router, f"{p50:.1f}", f"{p99:.1f}", f"{rate:.2f}"] for router, (p50, p99, rate) in middle.items()]
    kv, turns = (middle[router] for router in ROUTERS)
    rows.append(["kv over round-robin", *(f"{ours / theirs:.2f}" for ours, theirs in zip(kv, turns, strict=True))])
    print(
        f"\n{machine_name()}; {NUM_WORKERS} workers with KV caches of {given.pool_tokens} tokens, {given.prefixes} "
        f"prefixes of {given.prefix_words} words, {given.requests} requests by {NUM_USERS} users; medians of "
        f"{given.rounds} rounds\n"
    )
    print(table(["router", "first token, ms", "99th percentile, ms", "hit rate"], rows))


if __name__ == "__main__":
    main()
