"""Parameters by name: the types of the model's inputs, guides, and files of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.cli.chat.conversation import Conversation, Value, load_conversation
from llmserve.cli.chat.parameters import as_inputs, names, parse
from llmserve.cli.chat.statistics import AnswerStatistics
from llmserve.client import TextDelta
from llmserve.errors import InvalidArgument

PIPELINE = Path(__file__).resolve().parents[3] / "pipelines/ensemble/config.pbtxt"


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    parsed: ModelConfig = text_format.Parse(PIPELINE.read_text(), ModelConfig())
    return parsed


def test_the_names_are_the_model_s_own_and_two_of_ours(config: ModelConfig) -> None:
    found = names(config)
    assert {"guide", "log_probs", "temperature", "seed", "min_p", "stop_words"} <= set(found)
    assert not {"messages", "text_input", "stream", "guided_decoding_guide", "return_log_probs"} & set(found)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_tokens", "12", 12), ("temperature", "0.7", 0.7), ("temperature", "1", 1.0), ("stop_words", "a b", "a b"),
        ("log_probs", "on", True), ("log_probs", "Off", False), ("return_perf_metrics", "yes", True),
        ("guide", "json", "json"), ("guide", "regex:a:b", "regex:a:b"),
    ],
)  # fmt: skip
def test_values_have_the_type_of_their_input(config: ModelConfig, name: str, text: str, value: Value) -> None:
    found = parse(config, name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("max_tokens", "1.5", "expected a number"), ("log_probs", "maybe", "expected on or off"),
        ("messages", "[]", "has no parameter messages"), ("guide", "xml", "expected json, regex:PATTERN"),
        ("guide", "json:x", "expected json, regex"), ("guide", "regex:", "expected json, regex"),
        ("guide", "schema:/nowhere/x", "cannot be read"), ("guide", "schema:{no", "is not JSON"),
    ],
)  # fmt: skip
def test_values_that_are_none(config: ModelConfig, name: str, text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse(config, name, text)


def test_our_words_become_inputs(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "s.json", tmp_path / "g.txt"
    schema.write_text('{"type": "object"}')
    grammar.write_text('root ::= "yes"')
    kind, guide = "guided_decoding_guide_type", "guided_decoding_guide"
    assert as_inputs({"guide": "json", "seed": 1}) == {kind: "json", "seed": 1}
    assert as_inputs({"guide": "regex:[a-z]+:"}) == {kind: "regex", guide: "[a-z]+:"}
    assert as_inputs({"guide": f"schema:{schema}"}) == {kind: "json_schema", guide: '{"type": "object"}'}
    assert as_inputs({"guide": 'schema:{"a": 1}'}) == {kind: "json_schema", guide: '{"a": 1}'}
    assert as_inputs({"guide": f"grammar:{grammar}"}) == {kind: "ebnf_grammar", guide: 'root ::= "yes"'}
    assert as_inputs({"log_probs": True}) == {"return_log_probs": True}
    assert as_inputs({"log_probs": False}) == {}


def test_a_conversation_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    talk = Conversation("Be brief.")
    talk.add("Ä?", "Ö!")
    talk.save(tmp_path / "x.json", "ensemble", {"seed": 1, "guide": "json"})
    assert load_conversation(tmp_path / "x.json") == (talk, {"seed": 1, "guide": "json"})
    assert talk.undo() == "Ä?"
    assert (talk.undo(), talk.messages) == (None, [])


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", "is not JSON"), ("[]", "is not a saved conversation"), ({"messages": [{"role": "user"}]}, "not a saved"),
        ({"messages": [USER]}, "must alternate"), ({"messages": [ASSISTANT, USER]}, "must alternate"),
        ({"messages": [USER, ASSISTANT], "parameters": {"x": [1]}}, "parameters must be"),
        ({"messages": [USER, ASSISTANT], "parameters": 5}, "parameters must be"),
    ],
)  # fmt: skip
def test_files_that_are_no_conversations(tmp_path: Path, document: Any, words: str) -> None:
    (tmp_path / "x.json").write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(InvalidArgument, match=words):
        load_conversation(tmp_path / "x.json")


def test_statistics_of_an_answer() -> None:
    found = AnswerStatistics(started=10.0)
    assert found.speed() == "no answer yet"
    found.add(TextDelta("a", log_probs=(-0.1, -0.2)))
    found.add(TextDelta(" b", log_probs=(-2.0,)))
    found.add(TextDelta("", finish_reason="length", prompt_tokens=9, cached_tokens=4, completion_tokens=11))
    found.first, found.last = 10.5, 11.5
    assert found.speed() == (
        "9 tokens (4 of them in the cache) -> 11 tokens, first after 500 ms, 10.0 tokens/s, cut at max_tokens"
    )
    assert found.sureness() == "probability 46.5% a token on average; least sure: 'b' 13.5%, 'a' 74.1%"
