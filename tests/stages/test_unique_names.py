"""No name comes twice in an object of a guided answer, whoever chose it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from llmserve.core import GuideState
from llmserve.stages.guides import GuideCompiler, GuideKind, GuideText
from llmserve.stages.tokenizer import Tokenizer
from llmserve.stages.unique_names import QuotedTokens, UsedNames
from tests.stages.test_guides import allowed_ids

TOKENS = (b'"', b"a", b"b", b'a"', b'"a"', b', "a": 1', b'"b":', b":", b",", b"1", b"{", b"}", b'\\"', b"ab", None)
ENDING = {b'"', b'"a"', b'"b":'}  # a name
SMALL: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "integer"}}


def repeating(text: bytes) -> set[bytes | None]:
    names = UsedNames()
    names.add(text)
    return {TOKENS[token] for token in names.repeating(QuotedTokens(TOKENS))}


def test_names_that_a_model_makes_up_are_not_kept_for_ever() -> None:
    tokens = QuotedTokens(TOKENS)
    for number in range(1000):
        tokens.containing(b'"%d"' % number)
    assert tokens.containing.cache_info().currsize < 500


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (b"", set()),
        (b'{"a', set()),
        (b'{"a": 1, "', {b'a"'}),
        (b'{"a": 1, "a', ENDING),
        (b'{"a": 1, "ab', set()),
        (b'{"a": 1, ', {b'"a"', b', "a": 1'}),
        (b'{"a": 1', {b', "a": 1'}),
        (b'{"a": {"', set()),  # an object in it
        (b'{"a": {"a": 1}, "', {b'a"'}),
        (b'{"a": "', set()),  # a value
        (b'{"a": ["a", "', set()),
        (b'[{"a": 1}, {"', set()),
        (b'{"a\\"": 1, "a\\', set()),
        (b'{"a\\"": 1, "a\\"', ENDING),
        (b'{"b": ",", "', set()),
    ],
)
def test_the_tokens_that_would_repeat_a_name(text: bytes, tokens: set[bytes]) -> None:
    assert repeating(text) == tokens


def names_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), names
    return dict(pairs)


@pytest.mark.parametrize("text", [GuideText(GuideKind.JSON), GuideText(GuideKind.JSON_SCHEMA, json.dumps(SMALL))])
def test_a_model_that_would_repeat_itself_does_not(text: GuideText, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """It wants to write the same member again and again."""
    tokenizer = tokenizers_by_kind["qwen"]
    guide = GuideCompiler(tokenizer, tokenizer.vocab_size).compile(text)
    written = tokenizer.written_bytes()
    rng, num_objects = random.Random(3), 0
    for _ in range(8):
        matcher, answer = guide.start(), b""
        wanted = b'{"q": 1, "q": 1, "q": 1, "q": 1}'
        for _ in range(120):
            ids = [token for token in allowed_ids(matcher.mask(())) if token < tokenizer.vocab_size]
            if matcher.state is not GuideState.OPEN:
                break
            fitting = [token for token in ids if (written[token] or b"?") == wanted[len(answer) :][:1]]
            closing = [token for token in ids if written[token] in (b'"', b"}", b":", b"1")]
            token = rng.choice(fitting or closing or ids)
            answer += written[token] or b""
            matcher.advance(token)
        if matcher.is_complete():
            num_objects += 1
            assert answer.startswith(b'{"q": 1, "q')
            json.loads(answer, object_pairs_hook=names_of)
    assert num_objects


def test_a_name_that_has_to_come_again_may(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """A schema with fewer names than members is followed all the same: the answer is not cut off."""
    tokenizer = tokenizers_by_kind["qwen"]
    schema = {"type": "object", "patternProperties": {"^q$": {"const": 1}}, "additionalProperties": False}
    guide = GuideCompiler(tokenizer, tokenizer.vocab_size).compile(GuideText(GuideKind.JSON_SCHEMA, json.dumps(schema)))
    matcher = guide.start()
    for character in b'{"q":1,"q':
        token = tokenizer.written_bytes().index(bytes([character]))
        assert token in allowed_ids(matcher.mask(()))
        matcher.advance(token)
    assert allowed_ids(matcher.mask(()))


def test_a_copy_shares_nothing_with_its_original() -> None:
    names = UsedNames()
    names.add(b"{")
    names.copy().add(b'"a": 1, "b": [{')
    assert names.open == [set()]
    names.add(b'"a')
    names.copy().add(b'b"')
    names.add(b'"')
    assert names.open == [{b"a"}]
