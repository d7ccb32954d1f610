"""A rolling update behind HAProxy under load, as docs/balancing.md describes it."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve, start_server
from tests.e2e.test_balancers import DELAY_S, Balancer, program
from tests.e2e.test_streaming import metric
from tests.frontends.server import wait_until
from tools.soak.asking import STREAMS, Asker, StreamedAnswer, make_prompts

KINDS = (*STREAMS, "http_whole")
PROMPTS = make_prompts(5, seed=1, longest=40)
MAX_TOKENS = 40
NUM_USERS = 6


class Asked(NamedTuple):
    kind: str
    prompt: str
    answer: StreamedAnswer


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network in int4. Most of its answers differ."""
    engine = tmp_path_factory.mktemp("engines") / "demo-int4"
    done = llmserve("build", str(CHECKPOINT), "--quantization", "int4", "--output-dir", str(engine))
    assert done.returncode == 0, done.stderr
    return engine


@pytest.fixture
def balancer(demo_engine: Path, tmp_path: Path) -> Iterator[Balancer]:
    program("haproxy")
    made = Balancer("haproxy", tmp_path, [])
    try:
        made.servers += [serve(demo_engine) for _ in range(2)]
        made.start()
        yield made
    finally:
        made.close()


def serve(engine: Path, *flags: str) -> ServerProcess:
    return start_server(str(engine), "--threads", "1", "--shutdown-delay-secs", str(DELAY_S), *flags)


def replace(balancer: Balancer, number: int, engine: Path) -> None:
    """SIGTERM, then a new process at the same address; until HAProxy sends it requests."""
    old = balancer.servers[number]
    old.process.send_signal(signal.SIGTERM)
    assert old.process.wait(30) == 0
    names = {"HTTPService": "--http-port", "GRPCInferenceService": "--grpc-port", "Metrics Service": "--metrics-port"}
    ports = itertools.chain.from_iterable((names[service], str(port)) for service, port in old.ports.items())
    balancer.servers[number] = serve(engine, *ports)
    wait_until(lambda: metric(balancer.servers[number], "nv_inference_request_success", 'model="ensemble"') > 0)


def digest(server: ServerProcess) -> str:
    return str(httpx.get(f"{server.http}/v1/models").json()["data"][0]["engine"])


async def texts(server: ServerProcess) -> dict[tuple[str, str], str]:
    """What this server answers by itself."""
    asker = Asker(server.grpc, server.http.removeprefix("http://"), max_tokens=MAX_TOKENS)
    try:
        answers = {key: await asker.ask(*key) for key in itertools.product(KINDS, PROMPTS)}
    finally:
        await asker.close()
    assert not any(answer.error for answer in answers.values())
    return {key: answer.text for key, answer in answers.items()}


async def replaced_under_load(balancer: Balancer, engine: Path) -> list[Asked]:
    """Everything that users were answered meanwhile. They share one gRPC channel for all requests."""
    asker = Asker(balancer.grpc, balancer.http.removeprefix("http://"), max_tokens=MAX_TOKENS)
    done: list[Asked] = []
    questions = itertools.cycle(itertools.product(KINDS, PROMPTS))
    over = asyncio.Event()

    async def user() -> None:
        while not over.is_set():
            kind, prompt = next(questions)
            done.append(Asked(kind, prompt, await asker.ask(kind, prompt)))

    users = [asyncio.create_task(user()) for _ in range(NUM_USERS)]
    try:
        for number in range(2):
            await asyncio.to_thread(wait_until, lambda: len(done) > NUM_USERS)
            await asyncio.to_thread(replace, balancer, number, engine)
        num_before = len(done)
        await asyncio.to_thread(wait_until, lambda: len(done) >= num_before + 2 * NUM_USERS)
    finally:
        over.set()
        await asyncio.gather(*users)
        await asker.close()
    return done


def test_no_request_fails_and_no_answer_is_of_two_engines(balancer: Balancer, other_engine: Path) -> None:
    before = asyncio.run(texts(balancer.servers[0]))
    first = digest(balancer.servers[0])
    done = asyncio.run(replaced_under_load(balancer, other_engine))
    after = asyncio.run(texts(balancer.servers[0]))
    assert {digest(server) for server in balancer.servers}.isdisjoint({first})
    told_apart = {key for key in before if before[key] != after[key]}
    assert len(told_apart) > len(before) / 2

    assert [(asked.kind, asked.answer.error) for asked in done if asked.answer.error] == []
    answers = [((asked.kind, asked.prompt), asked.answer.text) for asked in done]
    assert [text for key, text in answers if text not in (before[key], after[key])] == []
    old, new = ([text == of[key] for key, text in answers if key in told_apart] for of in (before, after))
    assert min(sum(old), sum(new)) > NUM_USERS
    assert all(new[-NUM_USERS:]), "the old engine still answers"
