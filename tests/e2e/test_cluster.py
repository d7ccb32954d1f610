"""Workers of one engine behind a front end of Dynamo: real processes, and real clients."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve
from tests.e2e.test_streaming import DOCUMENTS
from tools.cluster.local import LocalCluster, is_there

pytestmark = pytest.mark.skipif(not is_there(), reason="there is no .venv-cluster: make cluster-env")
PROMPTS = [f"Summarize:\n{document}" for document in DOCUMENTS]
NUM_STREAMS, NEW_TOKENS = 100, 150  # so that all take a while, however fast the machine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_engine: Path) -> Iterator[LocalCluster]:
    opened = LocalCluster(tmp_path_factory.mktemp("cluster"), demo_engine)
    yield opened
    opened.close()


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def text_of(client: openai.AsyncOpenAI, prompt: str, model: str = "demo", **fields: Any) -> str:
    return "".join([piece async for piece in pieces_of(client, prompt, model, **fields)])


async def pieces_of(
    client: openai.AsyncOpenAI, prompt: str, model: str = "demo", **fields: Any
) -> AsyncGenerator[str, None]:
    async with await client.completions.create(model=model, prompt=prompt, stream=True, **fields) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                yield choice.text


def fields_of(number: int) -> dict[str, Any]:
    """Greedy, drawn with a seed, and drawn with filters and a penalty that counts the prompt, too; ended by a stop
    string, and by the end token where that may come after a least number of tokens only."""
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0}, {"ignore_eos": True}),
        ({"temperature": 1.1, "seed": number}, {"ignore_eos": True}),
        (
            {"temperature": 0.8, "seed": number, "top_p": 0.9},
            {"top_k": 30, "repetition_penalty": 1.1, "ignore_eos": True},
        ),
        ({"temperature": 1.0, "seed": number, "stop": [" the"]}, {"ignore_eos": True, "min_tokens": NEW_TOKENS // 3}),
        ({"temperature": 1.0, "seed": number}, {"min_tokens": NEW_TOKENS // 2}),
    ]
    fields, more = kinds[number % len(kinds)]
    return {**fields, "max_tokens": NEW_TOKENS, "extra_body": more}


GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 5}


async def test_answers_are_those_of_our_own_server(
    client: openai.AsyncOpenAI, server: ServerProcess, cluster: LocalCluster
) -> None:
    own = openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)
    model = (await own.models.list()).data[0].id
    for prompt in PROMPTS[:4]:
        for fields in (GREEDY, DRAWN):
            wanted = await text_of(own, prompt, model, max_tokens=24, **fields)
            assert await text_of(client, prompt, max_tokens=24, **fields) == wanted
    await own.close()


async def test_log_probs_come_with_the_tokens(client: openai.AsyncOpenAI) -> None:
    found = await client.completions.create(model="demo", prompt=PROMPTS[0], max_tokens=3, temperature=0, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token_log_prob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert token_log_prob is not None
        assert max(top.values()) == pytest.approx(token_log_prob, abs=1e-5)
        assert len(top) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty counts the answer's tokens"),
        ({"frequency_penalty": 0.5}, "use repetition_penalty, or workers started with --without-migration"),
        ({"extra_body": {"guided_regex": "a+"}}, "guided_decoding is not supported"),
    ],
)
async def test_what_a_worker_cannot_promise_is_refused_by_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        await client.completions.create(model="demo", prompt="x", max_tokens=2, **fields)


async def test_clients_that_leave_free_their_blocks(client: openai.AsyncOpenAI, cluster: LocalCluster) -> None:
    cancelled = total(cluster, "dynamo_component_cancellation_total")
    for number in range(8):
        stream = pieces_of(client, PROMPTS[number % 4], max_tokens=400, extra_body={"ignore_eos": True})
        await anext(stream)
        await stream.aclose()
    await until(lambda: total(cluster, "dynamo_component_cancellation_total") >= cancelled + 4)
    await until(lambda: total(cluster, "dynamo_component_gpu_cache_usage_percent") == 0)


def total(cluster: LocalCluster, metric: str) -> float:
    """Of both workers, over all labels."""
    lines = [line for number in (0, 1) for line in cluster.metrics(number).splitlines() if line.startswith(metric)]
    assert lines, f"no worker has {metric}"
    return sum(float(line.split()[-1]) for line in lines)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_streams_of_killed_workers_go_on_as_if_nothing_had_been(tmp_path: Path, demo_engine: Path) -> None:
    """Two of four die, each while all streams are under way: every text is what it would have been.

    The second dies after the front end has forgotten the first: until then Dynamo sends streams to it, and fails them.
    """
    chance = random.Random(0)
    cluster = LocalCluster(tmp_path / "cluster", demo_engine, num_workers=4)
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    try:
        asked = [(PROMPTS[number % len(PROMPTS)], fields_of(number)) for number in range(NUM_STREAMS)]
        wanted = await all_of(client, asked)
        for killed in (0, 1):
            heard = [0] * NUM_STREAMS
            answers = asyncio.create_task(all_of(client, asked, heard))
            until_now = chance.randrange(NUM_STREAMS * NEW_TOKENS // 10)
            while min(heard) == 0 or sum(heard) < until_now:  # an answer that has not begun may fail, as documented
                assert not answers.done(), f"every answer had ended before worker {killed} was killed"
                await asyncio.sleep(0.005)
            cluster.kill(killed)
            found = await answers
            assert [number for number in range(NUM_STREAMS) if found[number] != wanted[number]] == []
            await until(partial(has_forgotten, cluster, killed + 1))
        lengths = [len(text) for text in wanted]
        assert len(set(lengths[3::5])) > 5, "stop strings end answers at various places"
    finally:
        await client.close()
        cluster.close()


def has_forgotten(cluster: LocalCluster, count: int) -> bool:
    """Whether the front end has dropped so many workers."""
    return cluster.said("frontend").count("Removing worker") >= count


async def all_of(
    client: openai.AsyncOpenAI,
    asked: Sequence[tuple[str, dict[str, Any]]],
    heard: list[int] | None = None,
) -> list[str]:
    """`heard` counts the pieces of each answer as they come."""

    async def text(number: int, prompt: str, fields: dict[str, Any]) -> str:
        pieces: list[str] = []
        async for piece in pieces_of(client, prompt, **fields):
            pieces.append(piece)
            if heard is not None:
                heard[number] += 1
        return "".join(pieces)

    return await asyncio.gather(*(text(number, prompt, fields) for number, (prompt, fields) in enumerate(asked)))


async def test_chat_is_that_of_our_own_server(client: openai.AsyncOpenAI, server: ServerProcess) -> None:
    """With role tokens, which no chat template of the checkpoint tells of."""
    own = openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)
    model = (await own.models.list()).data[0].id
    for number in range(4):
        messages: list[Any] = [{"role": "user", "content": DOCUMENTS[number]}]
        if number % 2:
            messages.insert(0, {"role": "system", "content": "Summarize:\n"})
            messages += [{"role": "assistant", "content": "It is a function."}, {"role": "user", "content": "Go on"}]
        asked: dict[str, Any] = {"messages": messages, "max_tokens": 24, "temperature": 0}
        wanted = (await own.chat.completions.create(model=model, **asked)).choices[0].message.content
        assert (await client.chat.completions.create(model="demo", **asked)).choices[0].message.content == wanted
    await own.close()


async def test_full_workers_pass_requests_on(tmp_path: Path, demo_engine: Path) -> None:
    """All prompts begin alike, so all go to one worker, which has no room for them; then neither has."""
    flags = ("--max-queue-size", "1")
    cluster = LocalCluster(tmp_path / "cluster", demo_engine, num_workers=2, worker_flags=flags)

    async def statuses(client: openai.AsyncOpenAI, model: str, count: int) -> list[int]:
        async def status(number: int) -> int:
            asked: dict[str, Any] = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
            try:
                await client.completions.create(model=model, prompt=f"{PROMPTS[0]}{number}", **asked)
            except openai.APIStatusError as error:
                return error.status_code
            return 200

        return await asyncio.gather(*map(status, range(count)))

    try:
        room = 65  # a batch, and one that waits
        for url, model, full in (
            (cluster.url, "demo", {500, 503}),
            (cluster.add_server(demo_engine).http, "ensemble", {429}),
        ):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                await text_of(client, PROMPTS[0], model, max_tokens=2)
                assert await statuses(client, model, room + 25) == [200] * (room + 25)
                refused = set(await statuses(client, model, 2 * room + 60)) - {200}
                assert refused
                assert refused <= full
    finally:
        cluster.close()


@pytest.mark.parametrize("differs", ["weights", "words"])
async def test_another_engine_under_the_same_name_is_left_out(
    differs: str, tmp_path: Path, cluster: LocalCluster, demo_engine: Path, client: openai.AsyncOpenAI
) -> None:
    """The front end says so, and goes on with the first."""
    other, rejected = tmp_path / "other", cluster.said("frontend").count("Rejected incompatible workers")
    if differs == "weights":
        done = llmserve("build", str(CHECKPOINT), "--dtype", "bfloat16", "--output-dir", str(other))
        assert done.returncode == 0, done.stderr
    else:
        shutil.copytree(demo_engine, other)
        (other / "chat_template.jinja").write_text("{{ messages }}")
    wanted = await text_of(client, PROMPTS[0], max_tokens=8, temperature=0)
    worker = cluster.add_worker(other)
    cluster.wait_for_workers(len(cluster.workers))
    await until(lambda: cluster.said("frontend").count("Rejected incompatible workers") > rejected)
    for _ in range(6):
        assert await text_of(client, PROMPTS[0], max_tokens=8, temperature=0) == wanted
    assert cluster.stop(worker) == 0
