"""Guides over every kind of tokenizer: whatever tokens a mask allows, the text of a whole answer follows its guide."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from llmserve.core import Guide, GuideState
from llmserve.errors import InvalidArgument, ResourceExhausted
from llmserve.stages import guides
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.stages.conftest import WRITERS

EXTRA = 13  # tokens that an engine has beyond the tokenizer's
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "é", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ENDLESS = '{"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}'
DATE = r"[12]\d{3}-(0[1-9]|1[0-2]) (Mo|Di)"
SPACED = r" ?(fox|hill) "
ESCAPES = r"""root ::= "\u0041" [\u0041-\u0043] "\u00e9\U0001F600" [^\u0000-\u0040\u005d]* "\u0022\u005c\x41\\u0041" """
SUM = 'root ::= term (" + " term)* ";"\nterm ::= [0-9] | "(" root ")"'


def is_sum(text: str) -> bool:
    """SUM, read with a stack in place of a recursion."""
    while "(" in text:
        text, count = re.subn(r"\(\d( \+ \d)*;\)", "0", text)
        if not count:
            return False
    return re.fullmatch(r"\d( \+ \d)*;", text) is not None


def is_nested(text: str) -> bool:
    depth = len(text) // 2
    return text == "a" * depth + "." + "b" * depth


def is_valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        jsonschema.validate(json.loads(text), schema)
        return True

    return check


def gbnf_chain(length: int) -> str:
    rules = "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(length))
    return f'root ::= r0\n{rules}r{length} ::= "b"\n'


def lark_chain(length: int, depth: int) -> str:
    """The rules nest in each other, and each in itself."""
    begin, end = '("a" ' * depth, ")?" * depth
    rules = "".join(f"r{i}: {begin}r{i + 1}{end}\n" for i in range(length))
    return f'start: r0\n{rules}r{length}: "b"\n'


GUIDES: dict[str, tuple[GuideText, Callable[[str], bool]]] = {
    "json": (GuideText(GuideKind.JSON), is_valid({"type": "object"})),
    "schema": (GuideText(GuideKind.JSON_SCHEMA, json.dumps(PERSON)), is_valid(PERSON)),
    "regex": (GuideText(GuideKind.REGEX, DATE), lambda text: re.fullmatch(DATE, text) is not None),
    "spaced": (GuideText(GuideKind.REGEX, SPACED), lambda text: re.fullmatch(SPACED, text) is not None),
    "grammar": (GuideText(GuideKind.EBNF_GRAMMAR, SUM), is_sum),
    "lark": (GuideText(GuideKind.EBNF_GRAMMAR, 'start: "a" start "b" | "."'), is_nested),
}


# Vocabularies without bytes have no braces, and not all the digits: where that is noticed.
LACKING = {"unigram": ("json", "schema", "grammar"), "metaspace": ("json", "schema", "grammar")}
STUCK = {"unigram": "regex", "metaspace": "regex"}


def allowed_ids(mask: bytes) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))]


def walk(guide: Guide, vocab_size: int, rng: random.Random, *, end_id: int | None, most: int = 200) -> list[int] | None:
    """Tokens of a random answer; None when it is still open after `most`."""
    matcher = guide.start()
    tokens: list[int] = []
    while len(tokens) < most:
        mask = matcher.mask(() if end_id is None else (end_id,))
        if matcher.state is not GuideState.OPEN:
            break
        assert len(mask) == -(-vocab_size // 32) * 4
        ids = [token for token in allowed_ids(mask) if token < vocab_size]
        assert ids, "nothing is allowed, not even an end"
        if end_id in ids and len(tokens) > 20:
            return tokens
        token = rng.choice(ids)
        if token == end_id:
            return tokens
        tokens.append(token)
        matcher.advance(token)
    return tokens if matcher.is_complete() else None


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_likely_or_allowed_is_what_masks_say(
    kind: str, name: str, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    if name in (*LACKING.get(kind, ()), STUCK.get(kind)):
        pytest.skip("its vocabulary lacks what the guide needs")
    vocab_size, rng = tokenizer.vocab_size + EXTRA, random.Random(3)
    matcher = GuideCompiler(tokenizer, vocab_size).compile(GUIDES[name][0]).start()
    for _ in range(40):
        fork = matcher.fork()
        likely = matcher.likely()
        for token in likely:
            assert token in allowed_ids(fork.mask(()))
            fork.advance(token)
        assert matcher.num_allowed([*likely, vocab_size - 1]) == len(likely)  # which no tokenizer knows
        fork = matcher.fork()
        assert fork.mask(()) == matcher.mask(())
        ids = [token for token in allowed_ids(matcher.mask(())) if token < vocab_size]
        if not ids:
            assert not matcher.likely()
            break
        token = rng.choice(ids)
        assert matcher.num_allowed([token]) == 1
        fork.advance(rng.choice(ids))
        fork.mask(())
        matcher.advance(token)
    assert matcher.state is fork.state or matcher.fork().state is matcher.state


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("kind", WRITERS)
def test_complete_answers_follow_their_guide(kind: str, name: str, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    text, follows = GUIDES[name]
    tokenizer = tokenizers_by_kind[kind]
    vocab_size, end_id = tokenizer.vocab_size + EXTRA, tokenizer.vocab_size + 5
    compiler = GuideCompiler(tokenizer, vocab_size)
    if name in LACKING.get(kind, ()):
        with pytest.raises(InvalidArgument, match="cannot be followed"):
            compiler.compile(text)
        return
    guide = compiler.compile(text)
    rng = random.Random(1)
    answers = [walk(guide, vocab_size, rng, end_id=end_id) for _ in range(40)]
    complete = [tokenizer.decode(answer) for answer in answers if answer is not None]
    assert len(complete) > 3 or STUCK.get(kind) == name
    for answer in complete:
        assert follows(answer), repr(answer)


def test_what_a_token_writes_is_what_it_decodes_to(tokenizer: Tokenizer) -> None:
    """Behind another token, where no space is stripped."""
    written = tokenizer.written_bytes()
    assert len(written) == tokenizer.vocab_size
    anchor = next(token for token, text in enumerate(written) if text and text.isalnum())
    begin = tokenizer.decode([anchor])
    for token, text in enumerate(written):
        found = tokenizer.decode([anchor, token])
        if text is None:
            assert found == begin or "\ufffd" in found or "⁇" in found, token
        elif text.decode(errors="ignore").encode() == text:
            assert found == begin + text.decode(), token


@pytest.fixture
def compiler(tokenizers_by_kind: dict[str, Tokenizer]) -> Iterator[GuideCompiler]:
    tokenizer = tokenizers_by_kind["qwen"]
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


WRONG: dict[str, tuple[GuideText, str]] = {
    "not JSON": (GuideText(GuideKind.JSON_SCHEMA, "{"), "cannot be followed"),
    "lengths": (GuideText(GuideKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 2}'), "minLength"),
    "no type": (GuideText(GuideKind.JSON_SCHEMA, '{"type": "strng"}'), "strng"),
    "nothing": (GuideText(GuideKind.JSON_SCHEMA, "false"), "cannot be followed"),
    "itself": (GuideText(GuideKind.JSON_SCHEMA, '{"$ref": "#"}'), "because # requires itself"),
    "endless": (GuideText(GuideKind.JSON_SCHEMA, ENDLESS), "#/properties/n requires itself"),
    "elsewhere": (GuideText(GuideKind.JSON_SCHEMA, '{"$ref": "http://example.com/x"}'), "example.com"),
    "keyword": (GuideText(GuideKind.JSON_SCHEMA, '{"if": {}, "then": {}}'), "Unimplemented"),
    "deep": (GuideText(GuideKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500), "recursion"),
    "large": (GuideText(GuideKind.JSON_SCHEMA, json.dumps({"enum": [str(i) for i in range(20000)]})), "65536"),
    "brackets": (GuideText(GuideKind.REGEX, "["), "unclosed"),
    "look-around": (GuideText(GuideKind.REGEX, "(?=a)b"), "look-around"),
    "no character": (GuideText(GuideKind.REGEX, r"[^\s\S]"), "no answer of this model can follow it"),
    "nothing at all": (GuideText(GuideKind.REGEX, "x{0}"), "only an empty answer"),
    "explosion": (GuideText(GuideKind.REGEX, "(a{1000}){1000}{1000}"), "cannot be followed"),
    "work": (GuideText(GuideKind.REGEX, "b" * 20_000), "ms of work"),
    "no rule": (GuideText(GuideKind.EBNF_GRAMMAR, "root ::= other"), "other"),
    "no root": (GuideText(GuideKind.EBNF_GRAMMAR, 'thing ::= "a"'), "root"),
    "no end": (GuideText(GuideKind.EBNF_GRAMMAR, 'root ::= "a" root'), ""),
    "many bytes": (GuideText(GuideKind.EBNF_GRAMMAR, f'root ::= "{"a" * 40_000}"'), "bytes, more than 32768"),
    "a chain of rules": (GuideText(GuideKind.EBNF_GRAMMAR, gbnf_chain(1200)), "1202 rules, more than 500"),
    "a chain of Lark": (GuideText(GuideKind.EBNF_GRAMMAR, lark_chain(4000, 0)), "4002 rules, more than 500"),
    "options": (GuideText(GuideKind.REGEX, "a?" * 20_000), "too big"),
    "parentheses": (GuideText(GuideKind.EBNF_GRAMMAR, "root ::= " + "(" * 20000), "cannot be followed"),
}


@pytest.mark.parametrize("name", [name for name in WRONG if name != "no end"])
async def test_wrong_guides_are_refused_soon_and_by_name(
    name: str, compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, words = WRONG[name]
    if name == "work":
        monkeypatch.setattr(guides, "MAX_TOKEN_S", 0.0005)  # for machines of any speed
    began = time.monotonic()
    with pytest.raises(InvalidArgument, match=re.escape(words)) as caught:
        await compiler.compiled(text)
    assert time.monotonic() - began < 10
    assert text.kind.value in str(caught.value)
    assert len(str(caught.value)) < 700
    await compiler.compiled(GuideText(GuideKind.JSON))


async def test_guides_are_compiled_once_and_the_latest_are_kept(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides, "MAX_KEPT", 2)
    texts = [GuideText(GuideKind.REGEX, f"a{{{number}}}") for number in (1, 2, 3)]
    first, second = [await compiler.compiled(text) for text in texts[:2]]
    assert await compiler.compiled(texts[0]) is first
    await compiler.compiled(texts[2])
    assert await compiler.compiled(texts[0]) is first
    assert await compiler.compiled(texts[1]) is not second


async def test_what_was_refused_is_not_compiled_again(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GuideText(GuideKind.REGEX, "[")
    with pytest.raises(InvalidArgument) as first:
        await compiler.compiled(text)
    monkeypatch.setattr(compiler, "compile", None)
    with pytest.raises(InvalidArgument) as again:
        await compiler.compiled(text)
    assert str(again.value) == str(first.value)


async def test_one_that_is_slow_does_not_hold_up_others_and_who_leaves_gives_up_its_place(
    compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, go_on, compiled = compiler.compile, threading.Event(), []

    def slow(text: GuideText) -> Guide:
        compiled.append(text.text)
        if text.text.startswith("slow"):
            assert go_on.wait(60)
        return compile_(text)

    monkeypatch.setattr(compiler, "compile", slow)

    def begun(*texts: str) -> list[asyncio.Task[Guide]]:
        return [asyncio.create_task(compiler.compiled(GuideText(GuideKind.REGEX, text))) for text in texts]

    running = begun(*[f"slow{number}" for number in range(guides.NUM_THREADS - 1)])
    await asyncio.gather(*begun("quick"))
    running += begun("slow")
    (left,) = begun("left")
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    go_on.set()
    await asyncio.gather(*running)
    await asyncio.gather(*begun("later"))
    assert "left" not in compiled
    assert "later" in compiled


def test_escapes_of_gbnf_are_the_characters_that_they_name(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["qwen"]
    guide = GuideCompiler(tokenizer, tokenizer.vocab_size).compile(GuideText(GuideKind.EBNF_GRAMMAR, ESCAPES))
    for text, is_allowed in (
        ('AB\u00e9\U0001f600xyz"\\A\\u0041', True),
        ('A\u4041\u00e9\U0001f600"\\A\\u0041', False),
        ('ABé\U0001f600A]"\\A\\u0041', False),
    ):
        ids = tokenizer.encode(text)
        assert (guide.start().num_allowed(ids) == len(ids)) == is_allowed


async def test_the_deepest_grammar_is_compiled_and_followed(compiler: GuideCompiler) -> None:
    """Eight MiB of stack, which threads have, are not enough for it: the library ended the process. Its tokens are
    chosen in threads like that."""
    guide = await compiler.compiled(GuideText(GuideKind.EBNF_GRAMMAR, lark_chain(498, 15)))
    answer = await asyncio.to_thread(walk, guide, compiler._vocab_size, random.Random(1), end_id=None, most=20)
    assert answer is None


async def test_so_many_wait_at_most(compiler: GuideCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "MAX_WAITING", 2)
    waiting = [
        asyncio.create_task(compiler.compiled(GuideText(GuideKind.REGEX, f"b{{{number}}}"))) for number in (1, 2)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="2 guides are waiting"):
        await compiler.compiled(GuideText(GuideKind.REGEX, "c"))
    await asyncio.gather(*waiting)


async def test_the_loop_goes_on_while_a_guide_is_compiled(compiler: GuideCompiler) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(400)}}
    text = GuideText(GuideKind.JSON_SCHEMA, json.dumps(schema))
    longest, last = 0.0, time.monotonic()
    task = asyncio.create_task(compiler.compiled(text))
    while not task.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    await task
    assert longest < 0.25


def test_an_answer_that_no_token_can_go_on_with_is_stuck(tmp_path: Path) -> None:
    """A vocabulary without the character: nobody knows before the answer has come so far."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "▁": 2}, []))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    guide = GuideCompiler(load_tokenizer(tmp_path), 3).compile(GuideText(GuideKind.REGEX, "(a|b){9}(c|d)"))
    matcher = guide.start()
    for _ in range(9):
        assert allowed_ids(matcher.mask(())) == [0, 1]
        matcher.advance(0)
    matcher.mask(())
    assert matcher.state is GuideState.STUCK
