"""Thoughts in front of answers, cut into pieces in every way."""

from __future__ import annotations

import itertools

import pytest

from llmserve.stages.answer_parts import PartKind
from llmserve.stages.chat_style import ChatStyle
from llmserve.stages.reasoning import TAGS, found_reasoning, is_open_after
from tests.stages.test_tool_formats import TOOLS, ways

THOUGHT = "Hm < 3.\n\nYes"
CASES = {
    "a thought": (False, f"<think>\n{THOUGHT}\n</think>\n\nFour.\n", THOUGHT, "Four.\n"),
    "an open thought": (True, f"{THOUGHT}\n</think>\n\nFour.", THOUGHT, "Four."),
    "opened again": (True, f"<think>\n{THOUGHT}</think>Four.", THOUGHT, "Four."),
    "no thought": (False, " <thin air>", "", " <thin air>"),
    "an empty thought": (False, "<think>\n\n</think>\n\nFour.", "", "Four."),
    "cut off": (False, f"<think>{THOUGHT} </thi", f"{THOUGHT} </thi", ""),
    "cut off in an open one": (True, THOUGHT, THOUGHT, ""),
    "nothing": (False, "", "", ""),
    "a later marker is text": (False, "a <think>b</think>", "", "a <think>b</think>"),
}


@pytest.mark.parametrize("form", TAGS)
@pytest.mark.parametrize("case", CASES)
def test_thoughts_and_answers(case: str, form: str) -> None:
    is_open, answer, thought, text = CASES[case]
    begin, end, half = TAGS[form].begin + TAGS[form].label, TAGS[form].end, TAGS[form].end[:5]
    answer, thought, text = (
        written.replace("<think>", begin).replace("</think>", end).replace("</thi", half)
        for written in (answer, thought, text)
    )
    for cuts in ways(answer):
        reader = ChatStyle(reasoning=form, is_open=is_open).reader(())
        assert reader is not None
        places = [0, *cuts, len(answer)]
        pieces = [answer[a:b] for a, b in itertools.pairwise(places)]
        parts = [part for piece in pieces for part in reader.read(piece)] + reader.read("", is_last=True)
        assert "".join(part.text for part in parts if part.kind is PartKind.THOUGHT) == thought, cuts
        assert "".join(part.text for part in parts if part.kind is PartKind.TEXT) == text, cuts


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("<think>Hm.</think>\n<response>\nFour.\n\nOr 4.\n</response>", "Four.\n\nOr 4."),
        ("<think>Hm.</think><response>Four. </resp", "Four. </resp"),
        ("<think>Hm.</think><response>Four.</response>\n", "Four."),
        ("<think>Hm.</think>\nFour. <response>", "Four. <response>"),
        ("<think>Hm.</think><response>", ""),
    ],
)
def test_an_answer_between_tags(answer: str, text: str) -> None:
    """As Granite 3.3 writes it."""
    for cuts in ways(answer):
        reader = ChatStyle(reasoning="granite").reader(())
        assert reader is not None
        places = [0, *cuts, len(answer)]
        pieces = [answer[a:b] for a, b in itertools.pairwise(places)]
        parts = [part for piece in pieces for part in reader.read(piece)] + reader.read("", is_last=True)
        assert "".join(part.text for part in parts if part.kind is PartKind.TEXT) == text, cuts
        assert "".join(part.text for part in parts if part.kind is PartKind.THOUGHT) == "Hm.", cuts


def test_an_answer_that_is_continued_has_thought() -> None:
    assert ChatStyle(reasoning="think", is_open=True).reader((), continues=True) is None
    assert ChatStyle().reader(TOOLS) is None


def test_where_a_prompt_ends() -> None:
    assert is_open_after("<|assistant|><think>\n", "think")
    assert is_open_after("<|turn>model\n<|channel>thought\n", "gemma4")
    assert is_open_after("<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>", "seed_oss")
    assert not is_open_after("<think>\n\n</think>\n\n", "think")
    assert not is_open_after("Begin with <think>.<|user|>x<|assistant|>", "think")
    assert not is_open_after("<think>", "")
    assert not is_open_after("<|channel>thought\n<channel|>", "gemma4")


def test_the_template_says_which_tags_thoughts_have() -> None:
    for form, tags in TAGS.items():
        assert found_reasoning(f"{{{{ message.content.split('{tags.end}')[-1] }}}}{tags.answer[0]}") == form
    assert found_reasoning("{{ message.content }}") == ""
