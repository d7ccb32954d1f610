"""API keys as the official clients send them, and refusals as they understand them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from llmserve.frontends.shared.api_keys import ApiKeys
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import serving

KEY, METERED_KEY, WRONG = "user-0123456789abcdef", "metered-0123456789abcdef", "nobody-0123456789abcdef"


@pytest.fixture(scope="module")
def locked(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    metered = f"{{name: metered, key: {METERED_KEY}, tokens_per_minute: 2}}"
    file.write_text(f"keys: [{{name: user, key: {KEY}}}, {metered}]")
    with serving(text_dir, ApiKeys(file)) as running:
        yield running


def openai_client(server: RunningServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0)


def anthropic_client(server: RunningServer, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.http_url, api_key=key, max_retries=0)


def test_openais_client(locked: RunningServer) -> None:
    with openai_client(locked, KEY) as client:
        assert client.models.list().data
        answer = client.chat.completions.create(
            model="ensemble", messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 3
    with openai_client(locked, WRONG) as client:
        with pytest.raises(openai.AuthenticationError, match="not valid") as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model="ensemble", prompt="hello")


def test_anthropics_client(locked: RunningServer) -> None:
    with anthropic_client(locked, KEY) as client:
        answer = client.messages.create(model="ensemble", max_tokens=3, messages=[{"role": "user", "content": "hello"}])
        assert answer.usage.output_tokens <= 3
    with anthropic_client(locked, WRONG) as client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(model="ensemble", max_tokens=3, messages=[{"role": "user", "content": "hello"}])
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["error"]["type"] == "authentication_error"


def test_a_key_without_tokens_is_told_when_to_come_back(locked: RunningServer) -> None:
    with openai_client(locked, METERED_KEY) as client:
        client.completions.create(model="ensemble", prompt="hello", max_tokens=3)
        with pytest.raises(openai.RateLimitError, match="has used its 2 tokens per minute") as caught:
            client.completions.create(model="ensemble", prompt="hello", max_tokens=3)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 10
