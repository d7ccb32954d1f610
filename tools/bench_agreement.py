"""Compares `llmserve bench` with NVIDIA's aiperf: they put the same load on the same server, in turn.

    make bench-agreement                        our server, with an engine that sleeps and uses no CPU time
    make bench-agreement URL=localhost:8000     a running server

Both send prompts with the same number of words. Each prompt is new, so that the server's prefix cache has none of them.
Times are medians, because one request that waits for one more step moves a mean of thirty by a twentieth. Each number
is the median over the rounds. The exit code is 1 if results differ by more than 5 %. By default there is one user: with
several, results depend more on their alignment with the engine's steps than on the clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from llmserve.benchmark.workload import Writer

MOST = 0.05  # the largest accepted difference
NUM_WORDS, NUM_TOKENS, NUM_WARM = 40, 12, 4
STEP_MS = 100  # of our server's engine: aiperf alone needs 3 ms to the first token, with two cores for itself
OPEN_TIMES = 4  # times as many requests at a rate: each arrives at another moment of a step, and they overlap
METRICS = {
    "output_token_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "time_to_first_token": "time to first token, ms (median)",
    "inter_token_latency": "inter-token latency, ms (median)",
    "request_latency": "request latency, ms (median)",
}


class Load(NamedTuple):
    name: str
    requests: int
    ours: Sequence[str]
    theirs: Sequence[str]


def loads(concurrency: int, rate: float, requests: int) -> list[Load]:
    """Returns the loads whose size is not 0."""
    users, pace = ["--concurrency", str(concurrency)], ["--request-rate", str(rate), "--arrival-pattern", "constant"]
    closed = Load("1 user" if concurrency == 1 else f"{concurrency} users", requests, users, users)
    arrivals = ["--rate", str(rate), "--arrivals", "constant"]
    opened = Load(f"{rate:g} requests/s", OPEN_TIMES * requests, arrivals, pace)
    return [load for load, size in ((closed, concurrency), (opened, rate)) if size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="ensemble")
    parser.add_argument("--aiperf", type=Path, default=Path(".venv-aiperf/bin/aiperf"))
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rate", type=float, default=3.7)
    parser.add_argument(
        "--requests", type=int, default=30, help=f"of the users; at the rate {OPEN_TIMES} times as many"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.url:
        differences = _compare(options)
    else:
        with _paced_server() as options.url:
            differences = _compare(options)
    sys.exit(0 if max(differences) <= MOST else 1)


@contextmanager
def _paced_server() -> Iterator[str]:
    """Runs the shipped pipelines over an engine that sleeps."""
    command = [sys.executable, "-m", "tools.server_benchmark.shipped", "serve", "--step-ms", str(STEP_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"127.0.0.1:{json.loads(server.stdout.readline())['http_port']}"
        finally:
            server.terminate()


def _compare(options: argparse.Namespace) -> list[float]:
    """Prints the tables, and returns the differences of the numbers."""
    generator = np.random.default_rng()
    differences = []
    for load in loads(options.concurrency, options.rate, options.requests):
        ours, theirs = [], []
        for number in range(options.rounds):
            print(f"{load.name}, round {number + 1} of {options.rounds}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                ours.append(_ours(Path(folder), load, options, generator))
                theirs.append(_theirs(Path(folder), load, options, generator))
        print(f"\n{load.name}, {load.requests} requests, answers of {NUM_TOKENS} tokens, {options.rounds} rounds\n")
        differences += _table(ours, theirs)
    return differences


def _table(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> list[float]:
    """Prints a table, and returns the differences."""
    print("| | llmserve bench | aiperf | difference |\n|---|---|---|---|")
    differences = []
    for metric, name in METRICS.items():
        mine, other = (statistics.median(run[metric] for run in runs) for runs in (ours, theirs))
        differences.append(abs(mine / other - 1))
        print(f"| {name} | {mine:.2f} | {other:.2f} | {mine / other - 1:+.1%} |")
    return differences


def _prompts(count: int, generator: np.random.Generator) -> list[str]:
    return [Writer(1.0).text(NUM_WORDS, generator) for _ in range(count)]


def _ours(folder: Path, load: Load, options: argparse.Namespace, generator: np.random.Generator) -> dict[str, float]:
    prompts = _prompts(load.requests + NUM_WARM, generator)
    (folder / "prompts.txt").write_text("\n".join(prompts))
    command = [
        str(Path(sys.executable).parent / "llmserve"), "bench", "--url", options.url, "--model", options.model,
        "--prompts", str(folder / "prompts.txt"), "--output-tokens", str(NUM_TOKENS), "--warmup", str(NUM_WARM),
        "--requests", str(load.requests), "--json", str(folder / "ours.json"), *load.ours,
    ]  # fmt: skip
    _run(command, folder)
    return _numbers(json.loads((folder / "ours.json").read_text())["runs"][0])


def _theirs(folder: Path, load: Load, options: argparse.Namespace, generator: np.random.Generator) -> dict[str, float]:
    prompts = _prompts(load.requests + NUM_WARM, generator)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"text": prompt}) for prompt in prompts))
    command = [
        str(options.aiperf.absolute()), "profile", "--url", options.url, "--model", options.model,
        "--endpoint-type", "chat",
        "--streaming", "--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn",
        "--dataset-sampling-strategy", "sequential", "--extra-inputs", f"max_tokens:{NUM_TOKENS}",
        "--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--tokenizer", str(_tokenizer(folder)),
        "--warmup-request-count", str(NUM_WARM), "--request-count", str(load.requests),
        "--no-auto-plot", "--ui", "none",
        "--artifact-dir", str(folder / "theirs"), *load.theirs,
    ]  # fmt: skip
    _run(command, folder)
    return _numbers(json.loads((folder / "theirs/profile_export_aiperf.json").read_text()))


def _tokenizer(folder: Path) -> Path:
    """Writes a tokenizer that aiperf can load offline. It is not used for counting, which the server does."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{Path(command[0]).name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def _numbers(document: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of METRICS: numbers in one program's document, distributions of one value in the other's."""
    found = {metric: document[metric] for metric in METRICS}
    return {metric: _median(value) for metric, value in found.items()}


def _median(value: Any) -> float:
    """The median of a distribution, or a rate as it is."""
    if isinstance(value, dict):
        value = value["p50"] if "p50" in value else value["avg"]
    return float(value)


if __name__ == "__main__":
    main()
