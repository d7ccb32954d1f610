"""Measures what a batch costs live streams, and what killing the server costs a batch: `make bench-batches`.

Sixteen clients stream from `llmserve serve ENGINE`, in turn with a batch and without: other work on the machine slows
both. The server with the batch is killed at the end of each of its turns, and continues it in the next turn. At the
end, every request of the batch must have one result, in order, with the same text as a separate request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from llmserve.engine.machine.description import machine_name
from tools.benchmark.markdown import table
from tools.benchmark.options import say
from tools.benchmark.statistics import quantile
from tools.servers import Endpoint, engine_server
from tools.soak.asking import Asker, make_prompts

NUM_LIVE = 16
ROWS = 64  # sequences of a full step
LIVE_TOKENS, BATCH_TOKENS = 64, 4
NUM_PROMPTS = 50
ENDPOINT = "/v1/completions"
TIMEOUT_S = 60.0
FINISH_S = 1800.0


@dataclass
class Measured:
    """Seconds between the tokens of live streams, by turn."""

    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)  # results when the server was killed, by turn
    full_step_s: float = 0.0

    def p99_ms(self, turns: Sequence[Sequence[float]]) -> float:
        return 1e3 * quantile([gap for turn in turns for gap in turn], 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench_batches", description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--report", type=Path, help="a Markdown file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured, problems = asyncio.run(
            measure(options.engine, Path(folder), options.requests, options.turns, options.seconds)
        )
    text = report(measured, problems, options)
    say(text)
    if options.report:
        options.report.write_text(text)
    raise SystemExit(bool(problems))


async def measure(
    engine: Path, folder: Path, num_requests: int, num_turns: int, seconds: float
) -> tuple[Measured, list[str]]:
    """Also returns what is wrong with the results."""
    prompts = make_prompts(NUM_PROMPTS, seed=1, longest=40)
    log, kept = folder / "log.txt", ("--batch-dir", str(folder / "batches"))
    found, batch_id = Measured(), ""
    for turn in range(num_turns):
        with engine_server(engine, log, *kept) as server:
            batch_id = batch_id or await create_batch(server, prompts, num_requests)
            found.beside.append(await live_gaps(server, NUM_LIVE, seconds))
            found.done.append(sum(await counts(server, batch_id)))
            os.kill(server.pid, signal.SIGKILL)
        say(f"turn {turn + 1}: {found.done[-1]} of {num_requests} results when the server was killed")
        with engine_server(engine, log) as server:
            found.alone.append(await live_gaps(server, NUM_LIVE, seconds))
    with engine_server(engine, log, *kept) as server:
        problems = await check(server, batch_id, prompts, num_requests)
        found.full_step_s = statistics.median(await live_gaps(server, ROWS, min(seconds, 10.0)))
    return found, problems


async def live_gaps(server: Endpoint, num_streams: int, seconds: float) -> list[float]:
    """Gaps of streams that follow each other, `num_streams` at a time."""
    prompts, gaps, ends = make_prompts(NUM_PROMPTS, seed=2), [], time.monotonic() + seconds
    asker = Asker(server.grpc, server.http, max_tokens=LIVE_TOKENS)

    async def stream(number: int) -> None:
        while time.monotonic() < ends:
            answer = await asker.ask("v1_stream", prompts[number % NUM_PROMPTS])
            assert not answer.error, answer.error
            gaps.extend(answer.gaps_s)
            number += num_streams

    try:
        await asyncio.gather(*map(stream, range(num_streams)))
    finally:
        await asker.close()
    return gaps


def body_of(prompt: str) -> dict[str, Any]:
    return {"model": "ensemble", "prompt": prompt, "max_tokens": BATCH_TOKENS, "temperature": 0}


async def create_batch(server: Endpoint, prompts: Sequence[str], num_requests: int) -> str:
    bodies = (body_of(prompts[number % len(prompts)]) for number in range(num_requests))
    lines = (
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body}) + "\n"
        for number, body in enumerate(bodies)
    )
    async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=TIMEOUT_S) as client:
        form = {"file": ("requests.jsonl", "".join(lines).encode())}
        file = (await client.post("/v1/files", data={"purpose": "batch"}, files=form)).raise_for_status().json()
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        made = (await client.post("/v1/batches", json=asked)).raise_for_status().json()
    return str(made["id"])


async def batch_of(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).raise_for_status().json()
    return found


async def counts(server: Endpoint, batch_id: str) -> tuple[int, int]:
    async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=TIMEOUT_S) as client:
        found = (await batch_of(client, batch_id))["request_counts"]
    return found["completed"], found["failed"]


async def check(server: Endpoint, batch_id: str, prompts: Sequence[str], num_requests: int) -> list[str]:
    """Waits for the batch, and returns what is wrong with its results."""
    ends = time.monotonic() + FINISH_S
    async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=TIMEOUT_S) as client:
        while (batch := await batch_of(client, batch_id))["status"] != "completed":
            if time.monotonic() > ends:
                return [f"the batch is {batch['status']} after {FINISH_S:.0f} s: {batch['request_counts']}"]
            await asyncio.sleep(0.5)
        content = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).raise_for_status().text
        alone = [
            (await client.post(ENDPOINT, json=body_of(prompt))).raise_for_status().json()["choices"][0]["text"]
            for prompt in prompts
        ]
    results = [json.loads(line) for line in content.splitlines()]
    problems = []
    if [line["custom_id"] for line in results] != [f"r{number}" for number in range(num_requests)]:
        problems.append(f"{len(results)} results of {num_requests} requests, or in a different order")
    texts = [line["response"]["body"]["choices"][0]["text"] for line in results]
    if num_other := sum(text != alone[number % len(prompts)] for number, text in enumerate(texts)):
        problems.append(f"{num_other} texts differ from those of single requests")
    return problems


def report(found: Measured, problems: Sequence[str], options: argparse.Namespace) -> str:
    head = ("", *(f"turn {number + 1}" for number in range(len(found.alone))), "all turns")
    rows = []
    for name, turns in (("alone", found.alone), ("with the batch", found.beside)):
        for title, fraction in (("p50", 0.5), ("p99", 0.99)):
            each = [f"{1e3 * quantile(turn, fraction):.1f}" for turn in turns]
            whole = 1e3 * quantile([gap for turn in turns for gap in turn], fraction)
            rows.append([f"{name}, {title}", *each, f"{whole:.1f}"])
    rows.append(["results when the server was killed", *(f"{count:,}" for count in found.done), ""])
    more = found.p99_ms(found.beside) - found.p99_ms(found.alone)
    step = 1e3 * found.full_step_s
    within = "within" if more <= step else "**more than**"
    results = "; ".join(problems) or "every request has one result, in order, with the same text as when sent alone"
    parts = [
        "# Batches and live streams",
        f"`make bench-batches` on {machine_name()}: a batch of {options.requests:,} requests of {BATCH_TOKENS} tokens, "
        f"{NUM_LIVE} live\nstreams of {LIVE_TOKENS} tokens, and turns of {options.seconds:g} s, alternating without "
        "and with the batch. The server is\nkilled with SIGKILL at the end of each turn with the batch, and the next "
        "server continues the batch.",
        "Milliseconds between the tokens of live streams:",
        table(head, rows),
        f"The p99 with the batch is {more:.1f} ms higher than without it, {within} one full step ({step:.1f} ms, the "
        f"median between\ntokens with {ROWS} live streams). Results of the batch: {results}.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
