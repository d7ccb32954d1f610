"""Responses that are kept: followed, fetched and deleted by the key that made them, within limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmserve.core import TokenEvent
from llmserve.errors import ResourceExhausted
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.openai import stored_responses
from llmserve.frontends.text.openai.background import MOST, MOST_OF_ONE, Background
from llmserve.frontends.text.openai.stored_responses import MAX_AGE_S, StoredResponses
from tests.frontends.server import STRICT, wait_until
from tests.frontends.text.conftest import serving
from tests.frontends.text.talkers import ARGUMENTS, TOOLS, WideEngine, talking

MODEL = "ensemble"
KEYS = {"ann": "ann-0123456789abcdef", "ben": "ben-0123456789abcdef"}


def test_a_response_follows_another(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(**asked, input="Hello", instructions="Be brief")
    second = client.responses.create(**asked, input="And then?", previous_response_id=first.id)
    by_hand: list[Any] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == client.responses.create(**asked, input=by_hand).output_text
    assert second.previous_response_id == first.id
    events = client.responses.create(**asked, input="And then?", previous_response_id=first.id, stream=True)
    last: Any = [*events][-1].response
    assert last.output_text == second.output_text
    third = client.responses.create(**asked, input="More", previous_response_id=last.id)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_stored_response_is_fetched_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_response_is_made_in_the_background(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Hello", "temperature": 0, "max_output_tokens": 16}
    made = client.responses.create(**asked, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    wait_until(lambda: client.responses.retrieve(made.id).status not in ("queued", "in_progress"))
    found = client.responses.retrieve(made.id)
    assert (found.status, found.output_text) == ("incomplete", client.responses.create(**asked).output_text)
    assert client.responses.cancel(made.id) == found
    follows = client.responses.create(model=MODEL, input="More", previous_response_id=made.id, max_output_tokens=4)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(follows.id)
    refused: list[dict[str, Any]] = [{"store": False}, {"stream": True}]
    for more in refused:
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(**{**asked, "background": True, **more})


def test_what_is_made_in_the_background_is_cancelled_or_fails(tmp_path: Path) -> None:
    with talking(tmp_path, "plain") as talker:
        engine, responses = talker.engine, talker.openai.responses
        with monkeypatched_stream(engine) as begun:
            made = responses.create(model=MODEL, input="Hello", background=True)
            assert begun.wait(60)
            assert responses.retrieve(made.id).status == "in_progress"
            with pytest.raises(openai.BadRequestError, match="is not complete yet"):
                responses.create(model=MODEL, input="x", previous_response_id=made.id)
            with pytest.raises(openai.NotFoundError):
                responses.retrieve("resp_x")
            assert responses.cancel(made.id).status == "cancelled"
            assert engine.closed
        assert responses.retrieve(made.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is cancelled: it cannot be continued"):
            responses.create(model=MODEL, input="x", previous_response_id=made.id)
        failing = responses.create(model=MODEL, input="fox " * 5000, background=True)
        wait_until(lambda: responses.retrieve(failing.id).status not in ("queued", "in_progress"))
        failed = responses.retrieve(failing.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert "context_length_exceeded" in failed.error.code
        responses.delete(made.id)


def test_one_key_does_not_take_the_places_of_others_in_the_background() -> None:
    async def scenario() -> None:
        tasks: set[asyncio.Task[None]] = set()
        background = Background(tasks)

        def begin(owner: str, number: int) -> None:
            background.begin(owner, lambda status: {"id": str(number)}, asyncio.Event().wait(), lambda document: None)

        for number in range(MOST_OF_ONE):
            begin("ann", number)
        with pytest.raises(ResourceExhausted, match=f"{MOST_OF_ONE} responses of yours"):
            begin("ann", MOST_OF_ONE)
        for number in range(MOST - MOST_OF_ONE):
            begin(f"other {number % 4}", number)
        with pytest.raises(ResourceExhausted, match=f"{MOST} responses already run"):
            begin("ben", 0)
        await background.cancel("ann", "0")
        begin("ben", 0)
        for task in [*tasks]:
            task.cancel()
        await asyncio.wait([*tasks])

    asyncio.run(scenario())


@contextmanager
def monkeypatched_stream(engine: WideEngine) -> Iterator[threading.Event]:
    """Answers that have begun and never end."""
    begun, told = threading.Event(), engine.submit

    async def endless() -> AsyncGenerator[TokenEvent, None]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield TokenEvent((), (), 0.0)
        finally:
            engine.closed = True

    engine.submit = lambda request: endless()  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        engine.submit = told  # type: ignore[method-assign]


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello", max_output_tokens=16, store=False)
    assert made.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_result_of_a_tool_follows_its_call(tmp_path: Path) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with talking(tmp_path, "qwen") as talker:
        talker.says(f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>')
        first = talker.openai.responses.create(model=MODEL, input="Weather?", tools=tools)
        call: Any = first.output[0]
        talker.says("Sunny")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        asked: Any = {"model": MODEL, "tools": tools, "input": [result], "previous_response_id": first.id}
        assert talker.openai.responses.create(**asked).output_text == "Sunny"
        prompt = talker.prompt
    assert prompt.index("Weather?") < prompt.index("get_weather", prompt.index("Weather?")) < prompt.index("sun")


def test_another_key_does_not_see_it(text_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [" + ", ".join(f"{{name: {name}, key: {key}}}" for name, key in KEYS.items()) + "]")
    with serving(text_dir, ApiKeys(file)) as server:
        ann, ben = (
            openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0) for key in KEYS.values()
        )
        with ann, ben:
            made = ann.responses.create(model=MODEL, input="Hello", max_output_tokens=16)
            for call in (ben.responses.retrieve, ben.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(made.id)
            with pytest.raises(openai.BadRequestError):
                ben.responses.create(model=MODEL, input="x", previous_response_id=made.id)
            assert ann.responses.retrieve(made.id).id == made.id


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_may_store_nothing(text_dir: Path, refuses: bool) -> None:
    settings = TextSettings(refuses_unknown_fields=refuses, stored_responses=0)
    with serving(text_dir, text=settings) as server, httpx.Client(base_url=server.http_url, timeout=60) as http:
        made = http.post("/v1/responses", json={"input": "Hello"}).json()
        assert made["store"] is False
        assert http.get(f"/v1/responses/{made['id']}").status_code == 404
        wanted = http.post("/v1/responses", json={"input": "Hello", "store": True})
        assert wanted.status_code == (400 if refuses else 200)
        assert "stores no responses" in wanted.text


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def put(store: StoredResponses, owner: str, name: str, size: int = 1) -> None:
    store.put(owner, {"id": name, "x": "x" * size}, [])


def test_responses_are_kept_for_a_while() -> None:
    clock = Clock()
    store = StoredResponses(10, clock)
    put(store, "a", "1")
    clock.now = MAX_AGE_S - 1
    put(store, "a", "2")
    assert store.find("a", "1")
    clock.now = MAX_AGE_S
    assert store.find("a", "1") is None
    assert store.find("a", "2")
    clock.now = 2 * MAX_AGE_S
    assert store.find("a", "2") is None


def test_who_holds_most_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    store = StoredResponses(3)
    for owner, name in (("a", "1"), ("b", "1"), ("b", "2"), ("b", "3")):
        put(store, owner, name)
    assert [bool(store.find(*which)) for which in (("a", "1"), ("b", "1"), ("b", "2"), ("b", "3"))] == [
        True, False, True, True,
    ]  # fmt: skip
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 1000)
    put(store, "b", "4", size=500)
    put(store, "b", "5", size=600)
    assert [bool(store.find("b", name)) for name in "2345"] == [False, False, False, True]
    assert store.find("a", "1")
    put(store, "a", "2", size=2000)  # more than all may have
    assert store.find("a", "2") is None


def test_the_strict_server_of_tests_stores() -> None:
    assert STRICT.stored_responses > 0
