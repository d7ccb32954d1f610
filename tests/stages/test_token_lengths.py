"""What the bytes of a text say about its tokens: never more than there are."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from llmserve.errors import PromptTooLong
from llmserve.stages import token_lengths
from llmserve.stages.bpe_tokenizer import JsonTokenizer
from llmserve.stages.files import TextFiles
from llmserve.stages.piece_tokenizer import PieceTokenizer
from llmserve.stages.token_lengths import (
    CANONICAL,
    MAX_TEXT_BYTES,
    check_length,
    longest_json_token,
    tokenizing_memory,
)
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizers import SENTENCES, sentencepiece_model, write_byte_level_tokenizer

PARTS = [
    *SENTENCES,
    " " * 40,
    "<|im_start|>",
    "<|endoftext|>",
    "</s>",
    "<0x41>",
    "\u212a\u0301",
    "\u1fbe\u0308\u0341",
    "狐",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=20).map("".join)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers with a bound, by name."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found: dict[str, Tokenizer] = {}
    for name in ("bytes", "composed"):
        (folder / name).mkdir()
        write_byte_level_tokenizer(folder / name, 400)
        if name == "composed":
            library = tokenizers.Tokenizer.from_file(str(folder / name / "tokenizer.json"))
            library.normalizer = normalizers.NFC()
            library.save(str(folder / name / "tokenizer.json"))
        found[name] = load_tokenizer(folder / name)
    for name, num_reserved in (("llama", 3), ("baichuan", 8)):
        (folder / name).mkdir()
        (folder / name / "tokenizer.model").write_bytes(sentencepiece_model(400, num_reserved))
        found[name] = load_tokenizer(folder / name)
    return found


@given(name=st.sampled_from(["bytes", "composed", "llama", "baichuan"]), text=TEXTS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_that_fits_is_never_refused(known: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = known[name]
    num_tokens = min(len(tokenizer.encode(text)), len(tokenizer.encode_marked(text)))
    assert tokenizer.longest_token is not None
    check_length(text, tokenizer, num_tokens + 1)


def test_a_text_that_cannot_fit_is_refused_with_the_limit(known: dict[str, Tokenizer]) -> None:
    for tokenizer in known.values():
        assert tokenizer.longest_token is not None
        check_length("x" * 99 * tokenizer.longest_token, tokenizer, 100)
        with pytest.raises(PromptTooLong, match="has at least 100 tokens, and this engine takes at most 99") as refused:
            check_length("x" * (99 * tokenizer.longest_token + 1), tokenizer, 100)
        assert (refused.value.num_tokens, refused.value.limit) == (100, 99)


def test_composition_shortens_no_text_by_more_than_is_assumed() -> None:
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    longest: dict[str, int] = {}
    for character in characters:
        apart = unicodedata.normalize("NFD", character)
        longest[apart] = max(longest.get(apart, 0), len(character.encode()))
    composed = [each for each in characters if unicodedata.normalize("NFC", each) == each]
    for character in composed:
        apart = unicodedata.normalize("NFD", character)
        assert sum(longest.get(part, len(part.encode())) for part in apart) <= CANONICAL * len(character.encode())


def dropping(path: Path) -> Iterator[tokenizers.Tokenizer]:
    """Tokenizers that may make nothing of a part of a text."""
    write_byte_level_tokenizer(path, 400)

    def library() -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    for normalizer in (
        normalizers.NFKC(), normalizers.StripAccents(), normalizers.Strip(), normalizers.Replace("xx", "x"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(tokenizers.Regex(" +"), " ")]),
    ):  # fmt: skip
        changed = library()
        changed.normalizer = normalizer
        yield changed
    changed = library()
    changed.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    yield changed
    changed = library()
    changed.add_tokens([AddedToken("<end>", rstrip=True)])
    yield changed
    yield tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    yield tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))


def test_where_something_may_be_dropped_nothing_is_claimed(tmp_path: Path) -> None:
    assert [longest_json_token(library) for library in dropping(tmp_path)] == [None] * 9


@pytest.mark.parametrize(
    "more", [{"byte_fallback": False}, {"remove_extra_whitespaces": True}, {"normalization_rule_name": "nmt_nfkc"}]
)
def test_sentencepiece_models_that_drop_something(tmp_path: Path, more: dict[str, Any]) -> None:
    model = io.BytesIO()
    usual: dict[str, Any] = {
        "byte_fallback": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_writer=model, model_type="bpe", vocab_size=400, minloglevel=2,
        num_threads=1, **{**usual, **more},
    )  # fmt: skip
    loaded = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert PieceTokenizer(loaded, TextFiles.read(tmp_path)).longest_token is None


class Unbounded:
    longest_token = None


def test_without_a_bound_a_text_has_a_limit_by_itself() -> None:
    check_length(" " * 99 * token_lengths.BYTES_PER_TOKEN, Unbounded(), 100)
    with pytest.raises(PromptTooLong, match=r"has 25345 bytes, of which at most 25344 are tokenized for the 99 tokens"):
        check_length(" " * (99 * token_lengths.BYTES_PER_TOKEN + 1), Unbounded(), 100)
    with pytest.raises(PromptTooLong, match="of which at most 4194304 are tokenized"):
        check_length("é" * (token_lengths.MAX_TEXT_BYTES // 2 + 1), Unbounded(), None)


def test_long_texts_have_the_same_ids(known: dict[str, Tokenizer]) -> None:
    """Which are made without holding the interpreter lock."""
    tokenizer = known["composed"]
    assert isinstance(tokenizer, JsonTokenizer)
    text = " ".join(SENTENCES) * 40
    assert tokenizer.encode(text) == tokenizer._library.encode(text).ids


@dataclass(frozen=True)
class Stage:
    tokenizer: JsonTokenizer
    max_seq_len: int | None


def test_memory_is_counted_of_what_is_tokenized_only(tmp_path: Path) -> None:
    write_byte_level_tokenizer(tmp_path, 300)
    tokenizer = JsonTokenizer.load(TextFiles.read(tmp_path))
    longest = tokenizer.longest_token
    assert longest is not None

    def memory(max_seq_len: int | None, **sizes: int) -> float:
        inputs = {name: np.array([[b"x" * size]], dtype=object) for name, size in sizes.items()}
        return tokenizing_memory(Stage(tokenizer, max_seq_len), inputs) / tokenizer.memory_per_byte

    assert memory(None, QUERY=1000, STOP_WORDS_DICT=10) == 1010
    assert memory(11, QUERY=10 * longest) == 10 * longest
    assert memory(11, QUERY=10 * longest + 1) == 0, "it is refused"
    assert memory(11, MESSAGES=1_000_000) == 10 * longest, "it is cut"
    assert memory(None, QUERY=MAX_TEXT_BYTES + 1) == 0
    batch = {
        name: np.array([[b"x" * 30], [b"x" * size]], dtype=object) for name, size in (("QUERY", 10), ("TOOLS", 70))
    }
    assert tokenizing_memory(Stage(tokenizer, None), batch) == 80 * tokenizer.memory_per_byte, "one row after another"
