"""What is likely to follow under a guide: what is forced, behind white space as the answer has written it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.core import Guide, Matcher
from llmserve.stages import likely_text
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.likely_text import Place, WhiteSpaces
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizers import write_byte_level_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "colour": {"enum": ["red", "dark blue"]},
        "size": {
            "type": "object",
            "properties": {"width": {"type": "integer"}, "is_new": {"type": "boolean"}},
            "required": ["width", "is_new"],
            "additionalProperties": False,
        },
    },
    "required": ["text", "colour", "size"],
    "additionalProperties": False,
}
VALUE = {"text": "a, b: {c", "colour": "red", "size": {"width": 7, "is_new": True}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level_tokenizer(folder, 400)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GuideCompiler:
    return GuideCompiler(tokenizer, tokenizer.vocab_size + 3)


@pytest.fixture
def guide(compiler: GuideCompiler) -> Guide:
    return compiler.compile(GuideText(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA)))


def behind(tokenizer: Tokenizer, matcher: Matcher, text: str) -> str:
    """What is likely to follow when the answer has gone on with `text`."""
    for token in tokenizer.encode(text):
        matcher.mask(())
        matcher.advance(token)
    return tokenizer.decode(list(matcher.likely()))


def test_signs_are_guessed_behind_white_space_as_it_was_written(tokenizer: Tokenizer, guide: Guide) -> None:
    pretty = guide.start()
    assert behind(tokenizer, pretty, "{\n ") == '"text": "'  # less than is usual
    assert behind(tokenizer, guide.start(), '{\n  "text": "a, b: {c"') == ',\n  "colour": "'
    answer = guide.start()
    assert behind(tokenizer, answer, '{\n  "text": "a, b: {c",') == '\n  "colour": "'
    assert behind(tokenizer, answer, '\n  "colour": "d') == 'ark blue",\n  "size": {\n    "width": '
    assert (
        behind(tokenizer, answer, 'ark blue",\n  "size": {\n    "width": 7,') == '\n    "is_new":'
    )  # " true" is a token
    assert behind(tokenizer, answer, '\n    "is_new": t') == "rue\n  }\n}"


def test_an_answer_is_guessed_to_be_like_the_last_one(tokenizer: Tokenizer, guide: Guide) -> None:
    assert behind(tokenizer, guide.start(), "{") == '"text": "'
    for written in (json.dumps(VALUE, separators=(",", ":")), json.dumps(VALUE, indent=4), json.dumps(VALUE)):
        assert behind(tokenizer, guide.start(), written) == ""
        assert tokenizer.decode(list(guide.start().likely())) == written.partition("a, b")[0]


def test_who_writes_otherwise_is_not_taken_for_the_last_one(tokenizer: Tokenizer, guide: Guide) -> None:
    behind(tokenizer, guide.start(), json.dumps(VALUE, indent=2))
    answer = guide.start()
    assert behind(tokenizer, answer, '{"text":"') == ""
    assert behind(tokenizer, answer, 'a","colour":"d') == 'ark blue","size":{"width":'


def test_a_draft_follows_the_fork_that_goes_on(tokenizer: Tokenizer, guide: Guide) -> None:
    matcher = guide.start()
    for token in tokenizer.encode('{"text": "x", '):
        matcher.mask(())
        before, matcher = matcher, matcher.fork()
        matcher.advance(token)
        before.fork().advance(token)
    assert tokenizer.decode(list(matcher.likely())) == '"colour": "'


@pytest.mark.parametrize("indent", [None, 2])
def test_a_guess_in_steps_is_the_one_made_at_once(tokenizer: Tokenizer, guide: Guide, indent: int | None) -> None:
    """Also where it came true as a whole, in parts, or not at all."""
    written = tokenizer.encode(json.dumps(VALUE, indent=indent))
    for stride in (1, 2, 5):
        answer = guide.start()
        for place in range(0, len(written) - stride, stride):
            fresh = guide.start()
            for matcher, begin in ((answer, place), (fresh, 0)):
                for token in written[begin : place + stride]:
                    matcher.mask(())
                    matcher.advance(token)
            found, at_once = list(answer.likely()), list(fresh.likely())
            assert found == at_once[: len(found)]
            assert bool(found) == bool(at_once)


def test_a_guess_is_not_made_again_while_it_comes_true(
    tokenizer: Tokenizer, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = guide.start()
    assert behind(tokenizer, answer, '{"text": "x"') == ', "colour": "'
    guess = list(answer.likely())
    monkeypatch.setattr(WhiteSpaces, "guess", None)  # raises
    for place, token in enumerate(guess[:-1], 1):
        answer.mask(())
        answer.advance(token)
        assert list(answer.likely()) == guess[place:]


def test_special_tokens_are_guessed_where_they_are_forced(tokenizer: Tokenizer, compiler: GuideCompiler) -> None:
    lark = 'start: <|im_start|> "call " /[0-9]/ ";" <|im_end|>'
    matcher = compiler.compile(GuideText(GuideKind.EBNF_GRAMMAR, lark)).start()
    begin, end = (tokenizer.encode(f"<|im_{side}|>")[0] for side in ("start", "end"))
    likely = list(matcher.likely())
    assert likely[0] == begin
    assert tokenizer.decode(likely[1:]) == "call "
    for token in [*likely, *tokenizer.encode("7")]:
        matcher.mask(())
        matcher.advance(token)
    assert list(matcher.likely()) == [*tokenizer.encode(";"), end]


def test_where_guesses_take_too_long_only_what_is_forced_is_drafted(
    tokenizer: Tokenizer, guide: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likely_text, "MAX_S", 0.0)
    matcher = guide.start()
    assert behind(tokenizer, matcher, '{"text": "x", ') == ""
    monkeypatch.undo()
    assert behind(tokenizer, matcher, '"') == 'colour"'  # and it is not tried again


def test_what_is_remembered_is_limited() -> None:
    shared: dict[Place, bytes] = {}
    spaces = WhiteSpaces(shared)
    for level in range(1000):
        spaces.learn(Place(b"{", level), b"\n" + b" " * level)
    assert len(shared) < 1000
