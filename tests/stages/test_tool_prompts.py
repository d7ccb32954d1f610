"""Tools, and what they said, on their way into a chat template; and what is refused on it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.errors import InvalidArgument
from llmserve.stages.answer_parts import PartKind
from llmserve.stages.chat import Message, messages_of
from llmserve.stages.chat_style import ChatStyle
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from llmserve.stages.stage_arrays import prepare_arrays, text_arrays
from llmserve.stages.tool_formats.generic import HOW, OPENING
from llmserve.stages.tool_formats.registry import TOOL_FORMATS
from llmserve.stages.tool_formats.tool_format import Tool
from tests.chat_templates import FORMATS, PLAIN, QWEN, write_talker
from tests.stages.test_preprocess import number, strings

VOCAB_SIZE = 420
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": "When?"}
CALL: dict[str, Any] = {
    "id": "call_0123456789abcdef",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"zone": "é"}'},
}
TALK: list[Any] = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "Noon", "tool_call_id": CALL["id"]},
]


def opened(path: Path, kind: str) -> Preprocessor:
    write_talker(path, kind, VOCAB_SIZE)
    return Preprocessor.open(path)


def prompt(stage: Preprocessor, messages: list[Any], *tools: Any) -> str:
    ids = stage.prepare(TextPrompt(messages=messages_of(messages), tools=tools)).input_ids
    return stage.tokenizer.decode(ids, skip_special_tokens=False)


def test_tools_and_calls_are_in_the_prompt(tmp_path: Path) -> None:
    text = prompt(opened(tmp_path, "qwen"), TALK, TOOL)
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "get_time", "arguments": {"zone": "é"}}\n</tool_call>' in text
    assert "<tool_response>\nNoon\n</tool_response>" in text


def test_mistrals_ids_have_nine_characters(tmp_path: Path) -> None:
    text = prompt(opened(tmp_path, "mistral"), TALK, TOOL)
    assert '"id": "789abcdef"' in text
    assert '"call_id": "789abcdef"' in text


@pytest.mark.parametrize("kind", ["deepseek", "deepseek31", "kimi"])
def test_calls_and_their_results_come_back_as_the_model_wrote_them(tmp_path: Path, kind: str) -> None:
    again = {**CALL, "id": "call_other", "function": {**CALL["function"], "arguments": ""}}
    several = [TALK[0], {**TALK[1], "tool_calls": [CALL, CALL]}, TALK[2], {**TALK[1], "tool_calls": [again]}]
    text = prompt(opened(tmp_path, kind), [*several, {**TALK[2], "tool_call_id": "call_other"}], TOOL)
    reader = TOOL_FORMATS[FORMATS[kind]].reader([Tool("get_time", {})])
    marker = "<|tool_calls_section_begin|>" if kind == "kimi" else "<｜tool▁calls▁begin｜>"
    answers = text.split(marker)[-2:]
    parts = [part for answer in answers for part in reader.read(marker + answer, is_last=True)]
    said = [part.text for part in parts if part.kind in (PartKind.CALL, PartKind.ARGUMENTS)]
    assert said == ["get_time", '{"zone": "é"}', "get_time", '{"zone": "é"}', "get_time", "{}"]
    if kind == "kimi":
        assert re.findall(r"functions\.get_time:(\d+)", text) == ["0", "1", "1", "2", "2"]


def test_deepseeks_template_does_not_describe_tools(tmp_path: Path) -> None:
    stage = opened(tmp_path, "deepseek")
    text = prompt(stage, [{"role": "system", "content": "Be brief."}, ASKED], TOOL)
    assert text.startswith(f"Be brief.\n\n{OPENING}\n{json.dumps(TOOL['function'])}\nTo call functions, ")
    assert "function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>" in text
    assert stage.chat_style({}).takes_tools


def test_a_template_for_tools_is_taken_for_them(tmp_path: Path) -> None:
    write_talker(tmp_path, "qwen", VOCAB_SIZE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    settings["chat_template"] = [{"name": "default", "template": plain}, {"name": "tool_use", "template": QWEN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    stage = Preprocessor.open(tmp_path)
    assert prompt(stage, [ASKED]) == "When?"
    assert "<|im_start|>user\nWhen?" in prompt(stage, [ASKED], TOOL)
    assert stage.chat_style({}).tool_format == "hermes"


@pytest.mark.parametrize(
    ("kind", "messages", "tools", "words"),
    [
        ("qwen", [], [TOOL], "tools require messages"),
        ("qwen", [{"role": "assistant", "tool_calls": [{}]}], [], 'must have a "function" with a "name"'),
        ("qwen", [{"role": "assistant"}], [], "must have a string in: content"),
        ("qwen", [{**ASKED, "tool_call_id": 5}], [], "invalid values in: tool_call_id"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, messages: list[Any], tools: list[Any], words: str) -> None:
    stage = opened(tmp_path, kind)
    with pytest.raises(InvalidArgument, match=words):
        prompt(stage, messages, *tools)


def test_tools_are_described_where_no_template_does(tmp_path: Path, tokenizer_dirs: dict[str, Path]) -> None:
    told = f"{OPENING}\n{json.dumps(TOOL['function'])}\n{HOW}"
    said = f"{json.dumps({'name': 'get_time', 'arguments': {'zone': 'é'}}, ensure_ascii=False)}"
    rest = f"[user]When?[assistant]{said}[user]Result of get_time: Noon"
    plain = opened(tmp_path, "plain")
    assert prompt(plain, TALK, TOOL) == f"[system]{told}{rest}[assistant]"
    assert prompt(plain, TALK) == f"{rest}[assistant]"
    brief = {"role": "system", "content": "Be brief"}
    assert prompt(plain, [brief, *TALK], TOOL) == f"[system]Be brief\n\n{told}{rest}[assistant]"
    several = [*TALK, {**TALK[-1], "content": "Late"}, {"role": "user", "content": "So?"}]
    assert prompt(plain, several).endswith("Noon\nResult of get_time: Late[user]So?[assistant]")
    without = Preprocessor.open(tmp_path, tool_format="none")
    with pytest.raises(InvalidArgument, match="chat template does not pass them to the model"):
        prompt(without, [ASKED], TOOL)
    marked = Preprocessor.open(tokenizer_dirs["baichuan"])  # with token ids for who speaks
    assert marked.chat_style({}).tool_format == "generic"
    assert len(prompt(marked, TALK, TOOL)) > len(prompt(marked, TALK)) > len(prompt(marked, TALK[:1]))


def test_a_template_that_refuses_system_messages_gets_tools_in_the_question(tmp_path: Path) -> None:
    write_talker(tmp_path, "plain", VOCAB_SIZE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{%- if messages[0].role == 'system' %}{{ raise_exception('no') }}{%- endif %}" + PLAIN
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = prompt(Preprocessor.open(tmp_path), [ASKED], TOOL)
    assert text.startswith(f"[user]{OPENING}")
    assert text.endswith(f"{HOW}\n\nWhen?[assistant]")


def test_what_a_template_says_of_calls_itself_stays(tmp_path: Path) -> None:
    write_talker(tmp_path, "qwen", VOCAB_SIZE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = QWEN.replace("<tool_call>", "<call>")  # a form that is not known
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    stage = Preprocessor.open(tmp_path)
    assert stage.chat_style({}).tool_format == "generic"
    assert "<tool_response>\nNoon\n</tool_response>" in prompt(stage, TALK)
    assert "Result of get_time: Noon" in prompt(stage, TALK, TOOL)


def test_dates_are_told_to_templates_that_read_them(tmp_path: Path) -> None:
    write_talker(tmp_path, "plain", VOCAB_SIZE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    head = "{{ functions }}{% if date_string is defined %}{{ date_string }}, {{ datetime }} {% endif %}"
    settings["chat_template"] = head + PLAIN
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert prompt(Preprocessor.open(tmp_path), [ASKED]) == "[user]When?[assistant]"
    days = {date.today()}
    told = prompt(Preprocessor.open(tmp_path, tells_date=True), [ASKED])
    days.add(date.today())
    assert told in {f"{day:%d %b %Y}, {day:%b %d %Y} [user]When?[assistant]" for day in days}


def test_token_ids_that_mark_who_speaks_say_nothing_of_tools(tokenizer_dirs: dict[str, Path]) -> None:
    stage = Preprocessor.open(tokenizer_dirs["baichuan"], tool_format="none")
    assert replace(stage.chat_style({}), tokenizer={}) == ChatStyle()
    with pytest.raises(InvalidArgument, match="tools: this checkpoint marks roles with token ids"):
        prompt(stage, [ASKED], TOOL)
    with pytest.raises(InvalidArgument, match="chat format has no tool_calls"):
        prompt(stage, TALK[:2])
    with pytest.raises(InvalidArgument, match="require a chat template"):
        Preprocessor.open(tokenizer_dirs["baichuan"], tool_format="hermes")


def test_arrays_of_tools_and_of_the_style(tmp_path: Path) -> None:
    stage = opened(tmp_path, "qwen3")
    limit = {"REQUEST_OUTPUT_LEN": number(4)}
    messages = {"MESSAGES": strings(json.dumps([ASKED])), **limit}
    out = prepare_arrays(stage, {**messages, "TOOLS": strings(json.dumps([TOOL]))})
    expected = stage.prepare(TextPrompt(messages=[Message("user", "When?")], tools=[TOOL]))
    assert tuple(out["INPUT_ID"][0].tolist()) == expected.input_ids
    for wrong in ("[", "{}", "[1]"):
        with pytest.raises(InvalidArgument, match="TOOLS"):
            prepare_arrays(stage, {**messages, "TOOLS": strings(wrong)})
    asked = {"RETURN_CHAT_STYLE": np.array([[True]]), **limit}
    style = ChatStyle.from_json(prepare_arrays(stage, asked)["CHAT_STYLE"].item().decode())
    assert (style.tool_format, style.reasoning) == ("hermes", "think")


def test_special_tokens_are_spelled_for_whoever_asks(tmp_path: Path) -> None:
    stage = opened(tmp_path, "mistral")
    ids = stage.tokenizer.encode_marked("[TOOL_CALLS]fox")
    arrays = {"TOKENS_BATCH": np.array([[ids]], np.int32), "SEQUENCE_LENGTH": number(len(ids))}
    post = Postprocessor(stage.tokenizer)
    for skips, text in ((None, b"fox"), (True, b"fox"), (False, b"[TOOL_CALLS]fox")):
        more = {} if skips is None else {"SKIP_SPECIAL_TOKENS": np.array([[skips]])}
        assert text_arrays(post, {**arrays, **more})["OUTPUT"].tolist() == [text]
