"""Calls of tools as models write them, in every form, cut into pieces in every way."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llmserve.core import Guide
from llmserve.errors import InvalidArgument
from llmserve.stages.answer_parts import Part, PartKind
from llmserve.stages.chat import TemplateFormat, chat_format, messages_of
from llmserve.stages.chat_style import ChatStyle, Wanted, answer_guide
from llmserve.stages.files import TextFiles
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.reasoning import TAGS
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from llmserve.stages.tool_formats.registry import TOOL_FORMATS
from llmserve.stages.tool_formats.tagged_arguments import argument
from llmserve.stages.tool_formats.tool_format import Tool
from tests.chat_templates import FORMATS, REASONING, SPECIAL, TEMPLATES, write_talker
from tests.stages.test_guides import walk

VOCAB_SIZE = 420
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Rome", "Bern"]}},
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("weather", PERSON), Tool("time-now", NOTHING))
CALL = ("weather", '{"city": "Rome \\"{", "days": [1, {"a": "}"}]}')
OTHER = ("time-now", "{}")
Calls = list[tuple[str, str]]


def said(parts: list[Part]) -> tuple[str, Calls]:
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        if part.kind is PartKind.TEXT:
            text += part.text
        elif part.kind is PartKind.CALL:
            calls.append((part.text, ""))
        elif part.kind is PartKind.ARGUMENTS:
            name, arguments = calls[-1]
            calls[-1] = name, arguments + part.text
    return text, calls


def read(name: str, answer: str, cuts: list[int]) -> tuple[str, Calls]:
    reader = TOOL_FORMATS[name].reader(TOOLS)
    places = [0, *cuts, len(answer)]
    parts = [part for a, b in itertools.pairwise(places) for part in reader.read(answer[a:b])]
    return said([*parts, *reader.read("", is_last=True)])


def ways(answer: str) -> Iterator[list[int]]:
    yield []
    yield list(range(1, len(answer)))
    rng = random.Random(len(answer))
    for _ in range(40):
        yield sorted(rng.sample(range(len(answer)), min(rng.randint(1, 6), len(answer))))


def tagged(*calls: tuple[str, str], member: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{member}": {arguments}}}' for name, arguments in calls]


(ONE,), (TWO,), (LLAMA_ONE,) = tagged(CALL), tagged(OTHER), tagged(CALL, member="parameters")
DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
V3_ONE = f"function<｜tool▁sep｜>weather\n```json\n{CALL[1]}\n```"
V31_ONE = f"weather<｜tool▁sep｜>{CALL[1]}"
KIMI_ONE = f"functions.weather:3<|tool_call_argument_begin|>{CALL[1]}"
ANSWERS: dict[str, tuple[str, str, str, Calls]] = {
    "a call": ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [CALL]),
    "text before": ("hermes", f"Let me see.\n\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.", [CALL]),
    "two": ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "", [CALL, OTHER]),
    "no end": ("hermes", f"<tool_call>\n{ONE}", "", [CALL]),
    "text behind": ("hermes", f"<tool_call>{ONE}</tool_call>Done", "Done", [CALL]),
    "arguments first": (
        "hermes", f'<tool_call>{{"arguments": {CALL[1]}, "name": "weather"}}</tool_call>', "",
        [("weather", json.dumps(json.loads(CALL[1])))],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "", [("weather", "{}")]),
    "a text of arguments": (
        "hermes", '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
        [("weather", '{"a": 1}')],
    ),
    "an empty text of arguments": (
        "hermes", "".join(f'<tool_call>{{"name": "time-now", "arguments": "{it}"}}</tool_call>' for it in ("", " ")),
        "", [OTHER, OTHER],
    ),
    "cut off": ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    "cut off before the name ends": ("hermes", '<tool_call>\n{"name": "wea', '<tool_call>\n{"name": "wea', []),
    "an unknown tool": (
        "hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [],
    ),
    "no JSON": ("hermes", "<tool_call>{weather}</tool_call> x", "<tool_call>{weather}</tool_call> x", []),
    "no object": ("hermes", "<tool_call> none <tool_call>" + TWO, "<tool_call> none", [OTHER]),
    "text": ("hermes", "a < b <tool\n", "a < b <tool\n", []),
    "llama": ("llama3", LLAMA_ONE, "", [CALL]),
    "llama behind its token": ("llama3", f"<|python_tag|>{LLAMA_ONE}", "", [CALL]),
    "llama twice": ("llama3", f'\n{LLAMA_ONE}; {{"name": "time-now", "parameters": {{}}}}', "", [CALL, OTHER]),
    "llama with a type": (
        "llama3", '{"type": "function", "name": "time-now", "parameters": {}}', "", [OTHER],
    ),
    "llama in words": ("llama3", f"I call {LLAMA_ONE}", f"I call {LLAMA_ONE}", []),
    "llama with an answer in JSON": ("llama3", ' {"city": {"name": "x"}}', ' {"city": {"name": "x"}}', []),
    "llama with an unknown tool": ("llama3", '{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', []),
    "generic in tags": ("generic", f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}\n</tool_call>", "", [CALL, OTHER]),
    "generic with text behind": ("generic", f"<tool_call>{ONE}</tool_call>\n</b> Done", "</b> Done", [CALL]),
    "mistral": ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]", "", [CALL, OTHER]),
    "mistral with text": ("mistral", f"Well:[TOOL_CALLS][{ONE}]", "Well:", [CALL]),
    "mistral in words": ("mistral", "[1, 2]", "[1, 2]", []),
    "mistral with an empty list": ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    "mistral by name": (
        "mistral_args", f"[TOOL_CALLS]weather[ARGS]{CALL[1]}[TOOL_CALLS]time-now[ARGS]{{}}", "", [CALL, OTHER],
    ),
    "coder": (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=weather>\n<parameter=name>\n 5 \n\n</parameter>\n"
        "<parameter=age>\n5\n</parameter>\n<parameter=home>\nRome\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=time-now>\n</function>\n</tool_call>",
        "Well.", [("weather", '{"name": " 5 \\n", "age": 5, "home": "Rome"}'), OTHER],
    ),
    "coder with unknown arguments": (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=x>True</parameter><parameter=y>{a</parameter>"
        "<parameter=age>old</parameter><parameter=x>2</parameter></function></tool_call>Done",
        "Done", [("weather", '{"x": true, "y": "{a", "age": "old"}')],
    ),
    "seed": (
        "seed_oss",
        "Well.<seed:tool_call>\n<function=weather>\n<parameter=name> a\n</parameter>\n<parameter=age>5</parameter>\n"
        "</function>\n</seed:tool_call>",
        "Well.", [("weather", '{"name": " a\\n", "age": 5}')],
    ),
    "coder cut off": (
        "qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=age>\n5\n</parameter>\n<parameter=na", "",
        [("weather", '{"age": 5')],
    ),
    "coder with an unknown tool": (
        "qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>", [],
    ),
    "coder without a function": ("qwen3_coder", "a <tool_call> b" + "c" * 300, "a <tool_call> b" + "c" * 300, []),
    "coder without ends of functions": (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=age>\n5\n</parameter>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=age>\n6\n</parameter>\n"
        "<tool_call>\n<function=weather>\n<function=time-now>\n</function>\n</tool_call>Done",
        "Done", [("weather", '{"age": 5}'), ("weather", '{"age": 6}'), ("weather", "{}"), OTHER],
    ),
    "coder without ends of arguments": (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=name>\na\n<parameter=x>\n<parameter=age>\n5\n"
        "<parameter=home>\nRome\n</function>\n</tool_call>Done",
        "Done", [("weather", '{"name": "a\\n<parameter=x>", "age": 5, "home": "Rome"}')],
    ),
    "coder with tags in a text": (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=name>x<parameter=age></function> </tool></parameter></function>",
        "", [("weather", '{"name": "x<parameter=age></function> </tool>"}')],
    ),
    "coder without the first tag": (
        "qwen3_coder",
        "Well.\n\n<function=weather>\n<parameter=age>\n5\n</parameter>\n</function>\n</tool_call>\n"
        "<function=time-now></function>",
        "Well.", [("weather", '{"age": 5}'), OTHER],
    ),
    "coder that tells of a function": ("qwen3_coder", "See <function=f> and <fun", "See <function=f> and <fun", []),
    "glm": (
        "glm45",
        "Well.\n<tool_call>weather\n<arg_key>name</arg_key>\n<arg_value>5\n</arg_value>\n<arg_key>age</arg_key>\n"
        "<arg_value>5</arg_value>\n</tool_call>\n<tool_call>time-now</tool_call>",
        "Well.", [("weather", '{"name": "5\\n", "age": 5}'), OTHER],
    ),
    "glm without line breaks": (
        "glm45", "<tool_call>weather<arg_key>age</arg_key><arg_value>[1]</arg_value></tool_call>.", ".",
        [("weather", '{"age": "[1]"}')],
    ),
    "glm without an end": (
        "glm45", "<tool_call>time-now\n<tool_call>weather<arg_key>age</arg_key><arg_value>5</arg_value></tool_call>",
        "", [OTHER, ("weather", '{"age": 5}')],
    ),
    "minimax without ends": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="name">a</parameter>\n'
        '<invoke name="weather">\n<parameter name="name">b</invoke>\n<invoke name="time-now">\n</minimax:tool_call>\n',
        "", [("weather", '{"name": "a"}'), ("weather", '{"name": "b"}'), OTHER],
    ),
    "minimax": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="name">a\nb</parameter>\n</invoke>\n'
        '<invoke name="time-now">\n</invoke>\n</minimax:tool_call>\n',
        "", [("weather", '{"name": "a\\nb"}'), OTHER],
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Hm <|x|>.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{CALL[1]}<|call|>",
        "", [CALL],
    ),
    "harmony with a preamble": (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.time-now<|channel|>commentary json<|message|>",
        "I look.", [("time-now", "")],
    ),
    "harmony without arguments": (
        "harmony", "<|channel|>commentary to=functions.time-now<|message|><|call|>", "", [OTHER],
    ),
    "harmony in two messages": (
        "harmony", "<|channel|>final<|message|>One<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>",
        "One\n\ntwo", [],
    ),
    "harmony of an unknown tool": (
        "harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>', '{"a": 1}', [],
    ),
    "harmony in words": ("harmony", "assistants help", "assistants help", []),
    "harmony that ends in its head": ("harmony", "<|channel|>final<|message|>Yes.<|end|><|start|>assi", "Yes.", []),
    "harmony whose head never ends": ("harmony", "<|channel|>" + 450 * "x", "<|channel|>" + 450 * "x", []),
    "harmony with a head that ends too late": (
        "harmony", f"<|start|>{450 * 'x'}<|message|>y", f"<|start|>{450 * 'x'}<|message|>y", [],
    ),
    "harmony that tells of a marker": (
        "harmony", "<|channel|>final<|message|>The token <|start|> begins a message. " + 100 * "blah ",
        "The token \n\n<|start|> begins a message. " + 100 * "blah ", [],
    ),
    "harmony that tells of a marker at its end": (
        "harmony", "<|channel|>final<|message|>The token <|start|> begins a message of one channel.<|end|>",
        "The token \n\n<|start|> begins a message of one channel.", [],
    ),
    "harmony with a message without a head in front of a thought": (
        "harmony", "<|channel|>commentary?<|end|><|start|>assistant<|channel|>analysis<|message|>Secret", "", [],
    ),
    "harmony with a space for arguments": (
        "harmony", "<|channel|>commentary to=functions.time-now<|message|> <|call|>", "", [("time-now", " {}")],
    ),
    "deepseek": (
        "deepseek_v3",
        f"Well.\n\n{DEEPSEEK}{V3_ONE}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time-now\n```json\n"
        f"{{}}\n```{DEEPSEEK_END}",
        "Well.", [CALL, OTHER],
    ),
    "deepseek without a block, ends and arguments": (
        "deepseek_v3",
        f"{DEEPSEEK}function<｜tool▁sep｜>time-now\n```json\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>{V31_ONE}"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather {CALL[1]}",
        "", [OTHER, CALL, CALL],
    ),
    "deepseek without its first marker": (
        "deepseek_v3", f"Well. <｜tool▁call▁begin｜>{V3_ONE}{DEEPSEEK_END}Done", "Well.Done", [CALL],
    ),
    "deepseek cut off": ("deepseek_v3", f"{DEEPSEEK}{V3_ONE[:-20]}", "", [("weather", CALL[1][:-16])]),
    "deepseek cut off in its head": (
        "deepseek_v3", f"{DEEPSEEK}function<｜tool▁sep｜>wea", f"{DEEPSEEK}function<｜tool▁sep｜>wea", [],
    ),
    "deepseek 3.1": (
        "deepseek_v31",
        f"{DEEPSEEK}{V31_ONE}<｜tool▁call▁end｜><｜tool▁call▁begin｜>time-now<｜tool▁sep｜>{{}}{DEEPSEEK_END}\n",
        "", [CALL, OTHER],
    ),
    "deepseek 3.1 with broken arguments": (
        "deepseek_v31",
        f'{DEEPSEEK}weather<｜tool▁sep｜>{{"a": "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time-now<｜tool▁sep｜>'
        "{}<｜tool▁calls▁end｜>Done",
        "Done", [("weather", '{"a": "'), OTHER],
    ),
    "deepseek 3.1 with an unknown tool": (
        "deepseek_v31", f"{DEEPSEEK}f<｜tool▁sep｜>{{}}{DEEPSEEK_END}",
        f"{DEEPSEEK}f<｜tool▁sep｜>{{}}{DEEPSEEK_END}", [],
    ),
    "kimi": (
        "kimi_k2",
        f"Well.{KIMI}{KIMI_ONE}<|tool_call_end|><|tool_call_begin|> time-now:4 <|tool_call_argument_begin|> {{}} "
        f"{KIMI_END}",
        "Well.", [CALL, OTHER],
    ),
    "kimi without arguments and ends": (
        "kimi_k2",
        f"{KIMI}functions.time-now:0<|tool_call_argument_begin|><|tool_call_end|>\n<|tool_call_begin|>{KIMI_ONE}",
        "", [OTHER, CALL],
    ),
    "kimi with broken arguments": (
        "kimi_k2", f"{KIMI}functions.weather:0<|tool_call_argument_begin|>{{[{KIMI_END} Done", " Done",
        [("weather", "{[")],
    ),
    "kimi that tells of a marker": ("kimi_k2", f"See {KIMI}" + "x" * 400, f"See {KIMI}" + "x" * 400, []),
    "mistral by an unknown name": ("mistral_args", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]{}", []),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_read_however_it_is_cut(case: str) -> None:
    name, answer, text, calls = ANSWERS[case]
    for cuts in ways(answer):
        assert read(name, answer, cuts) == (text, calls), cuts


def test_a_name_comes_before_its_arguments_and_these_as_they_come() -> None:
    reader = TOOL_FORMATS["hermes"].reader(TOOLS)
    parts = [
        reader.read(piece) for piece in ('<tool_call>{"name": "weather", "arguments": {', '"city": ', '"Rome"', "}}")
    ]
    assert parts == [
        [Part(PartKind.CALL, "weather"), Part(PartKind.ARGUMENTS, "{")],
        [Part(PartKind.ARGUMENTS, '"city": ')],
        [Part(PartKind.ARGUMENTS, '"Rome"')],
        [Part(PartKind.ARGUMENTS, "}")],
    ]


def test_text_is_not_held_back_longer_than_it_may_mark_a_call() -> None:
    reader = TOOL_FORMATS["hermes"].reader(TOOLS)
    assert [reader.read(piece) for piece in ("one", " <", "two")] == [
        [Part(PartKind.TEXT, "one")], [], [Part(PartKind.TEXT, " <two")],
    ]  # fmt: skip


def test_a_long_answer_is_read_in_no_time() -> None:
    arguments = json.dumps({"text": 'x"{}' * 100_000})
    assert read("hermes", f'<tool_call>{{"name": "weather", "arguments": {arguments}}}', []) == (
        "", [("weather", arguments)],
    )  # fmt: skip
    junk = '{"name": "' * 20_000
    assert read("hermes", f"<tool_call>{junk}", list(range(0, len(junk), 7)))[1] == []


@pytest.fixture(scope="module")
def talkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in TEMPLATES}
    for kind, path in paths.items():
        write_talker(path, kind, VOCAB_SIZE)
    return paths


def style_of(path: Path, **values: Any) -> ChatStyle:
    found = chat_format(load_tokenizer(path), TextFiles.read(path))
    assert found is not None
    return found.style(values)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_form_is_that_of_the_chat_template(kind: str, talkers: dict[str, Path]) -> None:
    style = style_of(talkers[kind])
    assert (style.tool_format, style.takes_tools) == (FORMATS.get(kind, "generic"), True)
    assert (style.reasoning, style.is_open) == (REASONING.get(kind, ""), kind in ("r1", "nemotron"))
    assert list(style.special) == SPECIAL.get(kind, [])
    switches = {each: ["enable_thinking"] for each in ("qwen3", "glm", "gemma4")} | {"gpt_oss": ["reasoning_effort"]}
    switches |= {"granite": ["thinking"], "deepseek31": ["thinking"]}
    assert list(style.switches) == switches.get(kind, [])
    again = ChatStyle.from_json(style.to_json())
    assert (again.tools, list(again.special)) == (style.tools, list(style.special))


def test_a_message_may_say_whether_to_think(talkers: dict[str, Path]) -> None:
    said = [{"role": "system", "content": "/no_think"}, {"role": "assistant", "content": "/think"}]
    more = [*said, {"role": "user", "content": "On: /think"}]
    style, deaf = style_of(talkers["nemotron"]), style_of(talkers["r1"])
    assert (style.told_by(said).is_open, style.told_by(more).is_open, style.told_by(more[1:2]).is_open) == (
        False, True, True,
    )  # fmt: skip
    assert deaf.told_by(said).is_open
    assert ChatStyle.from_json(style.to_json()) == style


def test_a_prompt_that_ends_with_a_result_may_open_no_thought(talkers: dict[str, Path]) -> None:
    told = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]
    style = style_of(talkers["deepseek31"], thinking=True)
    assert (style.is_open, style.told_by(told[:1]).is_open, style.told_by(told).is_open) == (True, True, False)
    assert style_of(talkers["r1"]).told_by(told).is_open


def test_a_call_follows_a_thought(talkers: dict[str, Path]) -> None:
    style = style_of(talkers["deepseek31"], thinking=True)
    answer = f"Hm {{.</think>\n\n{DEEPSEEK}{V31_ONE}{DEEPSEEK_END}"
    for cuts in ways(answer):
        reader = style.reader(TOOLS)
        assert reader is not None
        places = [0, *cuts, len(answer)]
        parts = [part for a, b in itertools.pairwise(places) for part in reader.read(answer[a:b])]
        parts += reader.read("", is_last=True)
        assert "".join(part.text for part in parts if part.kind is PartKind.THOUGHT) == "Hm {."
        assert said(parts) == ("", [CALL])


def test_a_config_names_a_form_or_none(talkers: dict[str, Path]) -> None:
    files = TextFiles.read(talkers["qwen3"])
    tokenizer = load_tokenizer(talkers["qwen3"])
    found = chat_format(tokenizer, files, tool_format="llama3", reasoning_format="none")
    assert found is not None
    assert (found.style().tool_format, found.style().reasoning) == ("llama3", "")
    with pytest.raises(InvalidArgument, match="tool_format is 'xml', which is not one of auto, none, hermes"):
        chat_format(tokenizer, files, tool_format="xml")


def test_a_template_that_wants_more_than_a_question_opens_no_thought(tmp_path: Path) -> None:
    write_talker(tmp_path, "r1", VOCAB_SIZE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    wants = "{%- if messages | length < 2 %}{{ raise_exception('too few') }}{%- endif %}"
    settings["chat_template"] = wants + settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (style_of(tmp_path).reasoning, style_of(tmp_path).is_open) == ("think", False)


SCHEMAS = {"weather": PERSON, "time-now": NOTHING}


def compiled(path: Path, wanted: Wanted) -> tuple[Guide, Tokenizer]:
    tokenizer = load_tokenizer(path)
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE + 4)
    try:
        return compiler.compile(GuideText(GuideKind.EBNF_GRAMMAR, answer_guide(style_of(path), wanted))), tokenizer
    finally:
        compiler.close()


def answers(guide: Guide, tokenizer: Tokenizer, count: int) -> list[str]:
    """Random ones that are complete, with special tokens."""
    rng = random.Random(3)
    end_id = tokenizer.vocab_size + 1
    found = (walk(guide, VOCAB_SIZE + 4, rng, end_id=end_id, most=400) for _ in range(count))
    return [tokenizer.decode(each, skip_special_tokens=False) for each in found if each is not None]


ONE_CALL = ("llama", "gpt_oss", "plain")  # forms of a single call


def one_call(kind: str) -> str:
    return {
        "hermes": '<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "time-now", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "time-now", "arguments": {}}]',
        "mistral_args": "[TOOL_CALLS]time-now[ARGS]{}",
        "qwen3_coder": "<tool_call>\n<function=time-now>\n</function>\n</tool_call>",
        "seed_oss": "<seed:tool_call>\n<function=time-now>\n</function>\n</seed:tool_call>",
        "glm45": "<tool_call>time-now\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="time-now">\n</invoke>\n</minimax:tool_call>',
        "deepseek_v3": f"{DEEPSEEK}function<｜tool▁sep｜>time-now\n```json\n{{}}\n```{DEEPSEEK_END}",
        "deepseek_v31": f"{DEEPSEEK}time-now<｜tool▁sep｜>{{}}{DEEPSEEK_END}",
        "kimi_k2": f"{KIMI}functions.time-now:0<|tool_call_argument_begin|>{{}}{KIMI_END}",
        "harmony": "<|channel|>commentary to=functions.time-now <|constrain|>json<|message|>{}",
        "generic": '{"name": "time-now", "arguments": {}}',
    }[FORMATS[kind]]


def two_calls(kind: str) -> str:
    one = one_call(kind)
    if kind == "mistral":
        return one[:-1] + ", " + one.removeprefix("[TOOL_CALLS][")
    if kind == "minimax":
        return one.replace("</invoke>\n", '</invoke>\n<invoke name="time-now">\n</invoke>\n')
    if kind in ("deepseek", "deepseek31", "kimi"):
        begin, end = (KIMI, KIMI_END) if kind == "kimi" else (DEEPSEEK, DEEPSEEK_END)
        opening, closing = begin[begin.index("><") + 1 :], end[: end.index("><") + 1]
        between = "\n" if kind == "deepseek" else ""
        return one.replace(end, f"{closing}{between}{opening}{one.removeprefix(begin)}")
    return one + {"llama": "; ", "plain": "; ", "mistral_args": ""}.get(kind, "\n") + one


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("kind", FORMATS)
def test_calls_that_have_to_be_made_follow_their_schemas(kind: str, several: bool, talkers: dict[str, Path]) -> None:
    guide, tokenizer = compiled(talkers[kind], Wanted(TOOLS, must_call=True, several=several))
    style = style_of(talkers[kind])
    found = answers(guide, tokenizer, 60)
    assert len(found) > 10
    for answer in found:
        reader = style.reader(TOOLS)
        assert reader is not None
        parts = reader.read(answer, is_last=True)
        text, calls = said([part for part in parts if part.kind is not PartKind.THOUGHT])
        assert (text, bool(calls)) == ("", True), answer
        assert several or len(calls) == 1
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert follows(guide, tokenizer, one_call(kind))
    assert follows(guide, tokenizer, two_calls(kind)) == (several and kind not in ONE_CALL)


@pytest.mark.parametrize("kind", FORMATS)
def test_text_may_stand_instead_of_calls_but_not_for_one(kind: str, talkers: dict[str, Path]) -> None:
    guide, tokenizer = compiled(talkers[kind], Wanted(TOOLS, several=False))
    words = "<|channel|>final<|message|>" if kind == "gpt_oss" else ""
    lead = one_call(kind)[: one_call(kind).index("time-now")]
    assert follows(guide, tokenizer, f"{words}The fox runs.")
    assert not follows(guide, tokenizer, f"{lead}The fox runs.")
    assert follows(guide, tokenizer, one_call(kind))
    assert not follows(guide, tokenizer, one_call(kind).replace("time-now", "time-off"))
    if kind not in ONE_CALL:
        assert follows(guide, tokenizer, f"Well. {one_call(kind)}")


def follows(guide: Guide, tokenizer: Tokenizer, text: str) -> bool:
    matcher = guide.start()
    end_id = tokenizer.vocab_size + 1
    for token in tokenizer.encode_marked(text):
        if not matcher.mask((end_id,))[token // 8] >> token % 8 & 1:
            return False
        matcher.advance(token)
    return matcher.is_complete() or bool(matcher.mask((end_id,))[end_id // 8] >> end_id % 8 & 1)


def test_a_format_stands_instead_of_calls(talkers: dict[str, Path]) -> None:
    guide, tokenizer = compiled(talkers["qwen"], Wanted(TOOLS, schema=PERSON))
    assert follows(guide, tokenizer, '{"name": "a", "age": 3, "home": "Rome"}')
    assert follows(guide, tokenizer, '<tool_call>\n{"name": "time-now", "arguments": {}}\n</tool_call>')
    assert not follows(guide, tokenizer, "The fox")


def test_a_format_holds_in_the_channel_of_answers(talkers: dict[str, Path]) -> None:
    guide, tokenizer = compiled(talkers["gpt_oss"], Wanted(schema=NOTHING))
    thought = "<|channel|>analysis<|message|>A { thought.<|end|><|start|>assistant"
    for before in ("", thought):
        assert follows(guide, tokenizer, f"{before}<|channel|>final<|message|>{{}}")
        assert not follows(guide, tokenizer, f"{before}<|channel|>final<|message|>Text")
    assert not follows(guide, tokenizer, "{}")


def test_channels_are_thoughts_and_text_without_tools(talkers: dict[str, Path]) -> None:
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    style = style_of(talkers["gpt_oss"])
    for cuts in ways(answer):
        reader = style.reader(())
        assert reader is not None
        places = [0, *cuts, len(answer)]
        parts = [part for a, b in itertools.pairwise(places) for part in reader.read(answer[a:b])]
        parts += reader.read("", is_last=True)
        thought = "".join(part.text for part in parts if part.kind is PartKind.THOUGHT)
        assert (thought, said([part for part in parts if part.kind is PartKind.TEXT])) == ("Hm.", ("Yes.", []))


def test_a_thought_goes_with_its_calls_to_a_template_of_channels(talkers: dict[str, Path]) -> None:
    form = chat_format(load_tokenizer(talkers["gpt_oss"]), TextFiles.read(talkers["gpt_oss"]))
    assert isinstance(form, TemplateFormat)
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    text = form.text(messages_of(messages), tools=[{"type": "function", "function": {"name": "weather"}}])
    assert "<|channel|>analysis<|message|>Hm.<|end|>" in text
    assert 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>' in text


MIXED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F", 5]}, "days": {"type": ["integer", "null"]}, "note": {"anyOf": [{"type": "string"}]},
        "id": {"allOf": [{"type": "string"}, {"maxLength": 9}]},
        "age": {"type": "number", "allOf": [{"type": "integer"}]},
        "place": {"$ref": "#/$defs/place"}, "any": {}, "self": {"$ref": "#/properties/self"},
    },
    "$defs": {"place": {"type": "array", "items": {"$ref": "#/$defs/name"}}, "name": {"type": "string"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("unit", "C", '"C"'), ("unit", "5", "5"), ("days", "None", "null"), ("days", "3", "3"), ("days", "x", '"x"'),
        ("note", "3", '"3"'), ("place", '["a"]', '["a"]'), ("any", "[1", '"[1"'), ("any", "true", "true"),
        ("self", "1", "1"), ("days", "true", '"true"'),
        ("place", "['a']", '["a"]'), ("any", "{1: {2}}", '"{1: {2}}"'), ("days", "(" * 5000, json.dumps("(" * 5000)),
        ("days", "5.0", "5"), ("days", "5.5", '"5.5"'), ("id", "007", '"007"'), ("id", "7", '"7"'), ("age", "7", "7"),
        ("days", "1e999", '"1e999"'), ("any", "NaN", '"NaN"'),
    ],
)  # fmt: skip
def test_a_value_in_tags_has_the_type_of_its_schema(key: str, text: str, expected: str) -> None:
    assert argument(text, MIXED["properties"][key], MIXED) == expected


@pytest.mark.parametrize("kind", ["coder", "glm", "minimax"])
def test_guided_values_in_tags_follow_schemas_with_references(kind: str, talkers: dict[str, Path]) -> None:
    needed = {**MIXED, "required": ["unit", "place"]}
    tools = (Tool("weather", needed),)
    guide, tokenizer = compiled(talkers[kind], Wanted(tools, must_call=True, several=False))
    found = answers(guide, tokenizer, 60)
    assert len(found) > 2
    for answer in found:
        parts = TOOL_FORMATS[FORMATS[kind]].reader(tools).read(answer, is_last=True)
        ((_, arguments),) = said(parts)[1]
        named = {key: value for key, value in json.loads(arguments).items() if key in ("unit", "place")}
        jsonschema.validate(named, needed)


@pytest.mark.parametrize("kind", ["qwen3", "r1", "magistral", "gemma4"])
def test_a_format_holds_behind_a_thought(kind: str, talkers: dict[str, Path]) -> None:
    guide, tokenizer = compiled(talkers[kind], Wanted(schema=NOTHING))
    tags = TAGS[REASONING[kind]]
    begin = "" if kind == "r1" else tags.begin + tags.label
    assert follows(guide, tokenizer, f"{begin}\nA {{ thought.\n{tags.end}\n\n{{}}")
    assert not follows(guide, tokenizer, f"{begin}\nA thought.\n{tags.end}\n\nText")
    assert follows(guide, tokenizer, "{}") == (kind != "r1")
