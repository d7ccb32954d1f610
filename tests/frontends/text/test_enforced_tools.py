"""Calls that have to be made, by real engines with random weights: arguments always follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import openai
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.open import open_engine
from tests.chat_templates import FORMATS, write_talker
from tests.checkpoints import make_checkpoint
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import serving

MODEL, VOCAB_SIZE = "ensemble", 420
SIZE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["colour", "size", "name"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Bern"]}},
}
SCHEMAS = {"set_size": SIZE, "go_to": PLACE}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASKED: list[Any] = [{"role": "user", "content": "Do it"}]


@pytest.fixture(scope="module", params=list(FORMATS))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with real_talker(tmp_path_factory.mktemp(request.param), request.param) as server:
        yield server


@contextmanager
def real_talker(folder: Path, kind: str) -> Iterator[RunningServer]:
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    overrides: Any = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}
    make_checkpoint(checkpoint, "qwen2", with_tokenizer=False, **overrides)
    write_talker(checkpoint, kind, VOCAB_SIZE)
    build_engine(checkpoint, engine, BuildOptions(dtype="float32", tokens_per_block=8, max_batch_size=16))
    with serving(engine, open_engine=lambda: open_engine(engine)) as server:
        yield server


def test_required_calls_validate_however_they_are_drawn(real: RunningServer) -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 500}
    num_valid = 0
    with openai.OpenAI(base_url=f"{real.http_url}/v1", api_key="none", max_retries=0) as client:
        for more in (
            {"temperature": 0},
            {"temperature": 1.5, "seed": 3, "n": 8},
            {"temperature": 1, "seed": 5, "n": 8},
        ):
            for choice in client.chat.completions.create(**asked, **more, parallel_tool_calls=False).choices:
                if choice.finish_reason == "length":  # a thought without an end, say
                    continue
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                assert choice.message.tool_calls is not None
                (call,) = choice.message.tool_calls
                assert call.type == "function"
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
                num_valid += 1
    assert num_valid > 4


def test_a_named_tool_is_the_one_that_is_called(real: RunningServer) -> None:
    choice: Any = {"type": "function", "function": {"name": "go_to"}}
    asked: Any = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "max_tokens": 3000, "temperature": 1, "seed": 1}
    with openai.OpenAI(base_url=f"{real.http_url}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
            made = stream.get_final_completion().choices[0]
        whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
    for found in (made, whole):
        if found.finish_reason == "tool_calls":
            assert found.message.tool_calls is not None
            (call,) = found.message.tool_calls
            assert call.type == "function"
            assert call.function.name == "go_to"
            jsonschema.validate(json.loads(call.function.arguments), PLACE)
    assert made.finish_reason == whole.finish_reason


def test_any_of_anthropics(real: RunningServer) -> None:
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    with anthropic.Anthropic(base_url=real.http_url, api_key="none", max_retries=0) as claude:
        made = claude.messages.create(
            model=MODEL, messages=ASKED, max_tokens=500, tools=tools, tool_choice={"type": "any"},
            extra_body={"temperature": 0},
        )  # fmt: skip
    for block in made.content if made.stop_reason == "tool_use" else ():
        if block.type == "tool_use":
            jsonschema.validate(block.input, SCHEMAS[block.name])
