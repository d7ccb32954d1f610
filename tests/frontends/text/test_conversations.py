"""Conversations with ensembles that take text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.requests.ensembles import Ensemble, Ensembles
from llmserve.frontends.text.requests.messages import Conversations, Talk
from llmserve.frontends.text.requests.tools import Function, ToolUse
from tests.chat_templates import write_talker
from tests.frontends.stub_core import StubCore
from tests.stages.conftest import WRITERS

TALK = [{"role": "user", "content": "Hello"}]
ENSEMBLE = """
    name: "old"
    input { name: "text_input" data_type: TYPE_STRING dims: 1 } output { name: "text_output" data_type: TYPE_STRING }
    ensemble_scheduling { step {
        model_name: "preprocessing" input_map { key: "QUERY" value: "text_input" }
        output_map { key: "OUTPUT" value: "text_output" }
    } }
"""


class OldCore(StubCore):
    """One ensemble whose step reads the tokenizer in `directory`."""

    directory: Path

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        step = f'parameters {{ key: "tokenizer_dir" value {{ string_value: "{self.directory}" }} }}'
        config: ModelConfig = text_format.Parse(ENSEMBLE if name == "old" else step, ModelConfig())
        return config


def opened(kind: str, path: Path) -> tuple[Conversations, Ensemble]:
    core = OldCore()
    core.directory = path
    if kind:
        WRITERS[kind](path)
    ensembles = Ensembles(core, TextSettings())
    return Conversations(ensembles), ensembles.find("old")


async def test_the_chat_format_is_applied_here(tmp_path: Path) -> None:
    conversations, ensemble = opened("qwen", tmp_path)
    values = await conversations.values(ensemble, TALK)
    assert values.keys() == {"text_input"}
    assert "<|im_start|>user\nHello<|im_end|>" in values["text_input"][0]
    assert await conversations.values(ensemble, TALK) == values


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("baichuan", "special tokens that have no text form"),
        ("unigram", "has no chat template"),
        ("", "names a tokenizer_dir"),
    ],
)
async def test_where_there_is_none_it_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    conversations, ensemble = opened(kind, tmp_path if kind else tmp_path / "elsewhere")
    with pytest.raises(Refused, match=words):
        await conversations.values(ensemble, TALK)


TOOL = Function.model_validate({"name": "get_time"})


async def test_tools_go_into_the_chat_format_that_is_applied_here(tmp_path: Path) -> None:
    write_talker(tmp_path, "qwen", 420)
    conversations, ensemble = opened("", tmp_path)
    prepared = await conversations.prepared(ensemble, Talk(TALK, ToolUse([TOOL], [TOOL])))
    assert prepared.prompt.keys() == {"text_input"}
    assert '"name": "get_time"' in prepared.prompt["text_input"][0]
    said = prepared.said('<tool_call>{"name": "get_time", "arguments": {}}</tool_call>')
    assert (said.text, [call.name for call in said.calls]) == ("", ["get_time"])
    with pytest.raises(Refused, match="cannot be restricted to tools"):
        await conversations.prepared(ensemble, Talk(TALK, ToolUse([TOOL], [TOOL], must_call=True)))


async def test_calls_that_the_ensemble_cannot_show_are_refused(tmp_path: Path) -> None:
    write_talker(tmp_path, "mistral", 420)
    conversations, ensemble = opened("", tmp_path)
    with pytest.raises(Refused, match="no input skip_special_tokens"):
        await conversations.prepared(ensemble, Talk(TALK, ToolUse([TOOL], [TOOL])))
