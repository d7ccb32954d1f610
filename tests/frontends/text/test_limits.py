"""What a key may still ask for is said in the headers of its answers, as the official clients show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.cross_origin import READABLE
from llmserve.frontends.text.answers.limits import _openais
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import serving

FREE, FRESH, METERED, FEW, POOR = (
    f"{name}-0123456789abcdef" for name in ("free", "fresh", "metered", "few", "poor")
)  # only one test asks with the fresh one
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def locked(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(
        f"keys:\n- {{name: free, key: {FREE}}}\n- {{name: few, key: {FEW}, max_answers: 2}}\n"
        f"- {{name: fresh, key: {FRESH}, max_answers: 5, tokens_per_minute: 600}}\n"
        f"- {{name: metered, key: {METERED}, max_answers: 5, tokens_per_minute: 600}}\n"
        f"- {{name: poor, key: {POOR}, max_answers: 2, tokens_per_minute: 1}}\n"
    )
    with serving(text_dir, ApiKeys(file)) as running:
        yield running


def limits_of(headers: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in headers.items() if "ratelimit" in name}
    assert found.keys() <= {*READABLE.split(", ")}, "pages of other origins cannot read them"
    return found


def ask(server: RunningServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0)


def test_openais_names(locked: RunningServer) -> None:
    with ask(locked, FRESH) as client:
        raw = client.completions.with_raw_response.create(model="ensemble", prompt="hello", max_tokens=3)
        usage = raw.parse().usage
        assert usage is not None
        found = limits_of(raw.headers)
        assert found.pop("x-ratelimit-reset-tokens").endswith("s")
        assert 600 - usage.total_tokens <= int(found.pop("x-ratelimit-remaining-tokens")) <= 600  # some may be back
        assert int(found.pop("x-ratelimit-remaining-requests")) in (4, 5)  # the engine's thread counts between steps
        assert found.pop("x-ratelimit-reset-requests") in ("0s", "1s")
        assert found == {"x-ratelimit-limit-requests": "5", "x-ratelimit-limit-tokens": "600"}
        assert raw.headers["x-request-id"].startswith("req_")


def test_of_a_stream_they_come_with_its_beginning(locked: RunningServer) -> None:
    with ask(locked, FEW) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="ensemble", messages=MESSAGES, max_tokens=100, stream=True  # type: ignore[arg-type]
        )  # fmt: skip
        found = [value for _, value in sorted(limits_of(raw.headers).items())]
        assert found in (["2", "1", "1s"], ["2", "2", "0s"])  # an engine as fast as this may have ended
        assert list(raw.parse())


def test_a_refusal_has_them_too(locked: RunningServer) -> None:
    with ask(locked, POOR) as client:
        client.completions.create(model="ensemble", prompt="hello", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="ensemble", prompt="hello", max_tokens=1)
    assert limits_of(caught.value.response.headers)["x-ratelimit-limit-requests"] == "2"
    assert int(caught.value.response.headers["retry-after"]) >= 60


def test_more_answers_than_a_key_may_ever_have_are_no_matter_of_waiting(locked: RunningServer) -> None:
    with ask(locked, FEW) as client:
        for more in ({"n": 3, "temperature": 1}, {"extra_body": {"best_of": 3, "temperature": 1}}):
            with pytest.raises(openai.BadRequestError, match="2 answers running at once, but this request asks for 3"):
                client.completions.create(model="ensemble", prompt="hello", **more)


def test_a_list_of_prompts_takes_as_many_turns_as_its_key_needs(locked: RunningServer) -> None:
    with ask(locked, FEW) as client:
        for number in (1, 2):
            asked: dict[str, Any] = {"model": "ensemble", "prompt": ["hello"] * 5, "n": number, "max_tokens": 3}
            assert len(client.completions.create(**asked, temperature=1).choices) == 5 * number
            ends = [chunk.choices[0].finish_reason for chunk in client.completions.create(**asked, stream=True)]
            assert len(ends) - ends.count(None) == 5 * number  # what is drawn may end an answer earlier
        body = {"model": "ensemble", "messages": [MESSAGES] * 5, "max_tokens": 3}
        assert len(client.post("/chat/completions/batch", body=body, cast_to=dict[str, Any])["choices"]) == 5
    headers = {"Authorization": f"Bearer {FEW}"}
    body = {"prompt": ["hello"] * 5, "n_predict": 3}
    assert len(httpx.post(f"{locked.http_url}/completion", json=body, headers=headers).json()) == 5


def test_anthropics_names(locked: RunningServer) -> None:
    with anthropic.Anthropic(base_url=locked.http_url, api_key=METERED, max_retries=0) as client:
        raw = client.messages.with_raw_response.create(model="ensemble", max_tokens=3, messages=MESSAGES)  # type: ignore[arg-type]
        found = limits_of(raw.headers)
        assert (found["anthropic-ratelimit-requests-limit"], found["anthropic-ratelimit-tokens-limit"]) == ("5", "600")
        assert 0 < int(found["anthropic-ratelimit-tokens-remaining"]) < 600
        moment = datetime.fromisoformat(found["anthropic-ratelimit-tokens-reset"])
        assert moment - datetime.now(UTC) < timedelta(minutes=1)
        assert raw.headers["request-id"] == raw.headers["x-request-id"]
        assert not any(name.startswith("x-ratelimit") for name in found)


def test_keys_without_limits_and_answers_without_a_model_have_none(locked: RunningServer) -> None:
    with ask(locked, FREE) as client:
        raw = client.completions.with_raw_response.create(model="ensemble", prompt="hello", max_tokens=3)
        assert limits_of(raw.headers) == {}
    with ask(locked, METERED) as client:
        assert limits_of(client.models.with_raw_response.list().headers) == {}
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="nope", prompt="hello")
        assert limits_of(caught.value.response.headers) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.0121, "0.012s"), (59.9999, "1m0s"), (90.5, "1m30.5s"), (3600, "60m0s")]
)
def test_how_openai_writes_a_time(seconds: float, text: str) -> None:
    assert _openais(("tokens", 1, 0, seconds))["x-ratelimit-reset-tokens"] == text
