"""Concatenated deltas equal the decoding of all ids: any ids, any split, every kind of tokenizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.stages.detokenize import window_of
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.tokenizer import Tokenizer
from tests.stages.conftest import WRITERS

KINDS = pytest.mark.parametrize("kind", [*WRITERS])


def deltas(tokenizer: Tokenizer, ids: list[int], splits: list[int], *, skip: bool = True) -> list[str]:
    edges = [0, *sorted(min(split, len(ids)) for split in splits), len(ids)]
    stage = Postprocessor(tokenizer, skip_special_tokens=skip)
    return [
        stage.text(ids[start:end], window_of(tokenizer, ids[:start]), final=(number == len(edges) - 2))
        for number, (start, end) in enumerate(pairwise(edges))
    ]


def one_by_one(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return deltas(tokenizer, ids, list(range(1, len(ids))))


@KINDS
@settings(max_examples=150)
@given(data=st.data())
def test_deltas_join_to_the_full_decoding_of_any_ids(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    splits = data.draw(st.lists(st.integers(0, 40), max_size=40))
    assert "".join(deltas(tokenizer, ids, splits)) == tokenizer.decode(ids)
    assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids)


@KINDS
@settings(max_examples=100)
@given(data=st.data())
def test_deltas_join_for_streams_of_few_different_ids(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Long runs of bytes, spaces and special tokens are where windows go wrong."""
    tokenizer = tokenizers_by_kind[kind]
    few = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=3))
    awkward = [*tokenizer.encode("é汉😀 \n"), *tokenizer.encode("  "), 1, *few]
    ids = data.draw(st.lists(st.sampled_from(awkward), max_size=60))
    assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids)


@KINDS
@settings(max_examples=100)
@given(data=st.data())
def test_deltas_join_for_any_text(tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers_by_kind[kind]
    text = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
    ids = tokenizer.encode(text)
    joined = "".join(one_by_one(tokenizer, ids))
    assert joined == tokenizer.decode(ids)
    if kind == "qwen":
        assert joined == text


@pytest.mark.parametrize("kind", ["baichuan", "qwen", "llama-slow"])
def test_text_with_bytes_spaces_and_digits_comes_back_as_it_was(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    text = "The  fox,\n\t12345 times: 百川 naïve 👩‍👩‍👧 end "
    assert "".join(one_by_one(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("kind", ["baichuan", "qwen", "llama-slow", "llama-fast"])
def test_an_unfinished_character_waits_for_its_last_byte(tokenizers_by_kind: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("ox😀 ox")
    pieces = one_by_one(tokenizer, ids)
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert "😀" in "".join(pieces)


def test_an_unfinished_character_is_flushed_at_the_end(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_kind["baichuan"]
    ids = tokenizer.encode("ox😀")[:-1]
    pieces = one_by_one(tokenizer, ids)
    assert "".join(pieces[:-1]) == "ox"
    assert "".join(pieces) == tokenizer.decode(ids)
    assert pieces[-1].startswith("\ufffd")


@KINDS
@settings(max_examples=50)
@given(data=st.data())
def test_visible_special_tokens_join_too(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    words = [*tokenizer.encode("fox runs"), 1, 2]
    ids = data.draw(st.lists(st.sampled_from(words), max_size=20))
    pieces = deltas(tokenizer, ids, list(range(1, len(ids))), skip=False)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


def test_windows_stay_short_in_ordinary_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The small red fox runs over the quiet hill and hides under the old stone bridge. " * 5)
    assert max(len(window_of(tokenizer, ids[:end])) for end in range(len(ids))) <= 8
