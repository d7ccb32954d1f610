"""The vocabulary of a GGUF file: tokens with types and scores, and which of them begin and end a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.gguf.metadata import MetadataReader

MODEL_KEY = "tokenizer.ggml.model"
SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Tokens that end an answer in every model that has them, as in llama.cpp. Files often do not name the end token of a
# turn or of a call; and some converters marked these as user-defined tokens.
END_TEXTS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|return|>", "<|call|>", "<turn|>", "<eos>", "<|tool_response>",
))  # fmt: skip
ENDS_A_MESSAGE = "<|end|>"  # ends no answer if the vocabulary has the other two: gpt-oss's thoughts end with it
HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
MAX_NAMED = 5  # named in a message


class TokenType(IntEnum):
    """The same numbers as in a sentencepiece model."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]  # by id
    types: list[int]
    scores: NDArray[np.float32]
    special: Mapping[str, int]  # bos_token, eos_token, unk_token, pad_token, if the file names them
    end_ids: tuple[int, ...]  # the file's own end token first
    adds_bos: bool
    adds_eos: bool

    def of_type(self, *kinds: TokenType) -> dict[int, str]:
        return {i: self.tokens[i] for i, kind in enumerate(self.types) if kind in kinds}


def read_vocabulary(reader: MetadataReader, num_rows: int, *, adds_bos: bool) -> Vocabulary:
    """`num_rows` of the embedding limits the ids. `adds_bos` is the default. Problems go to `reader`."""
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(reader.texts("tokenizer.ggml.tokens") or [""])]
    if len(tokens) > num_rows:
        reader.problems.append(f"its vocabulary has {len(tokens)} tokens, but its embedding {num_rows} rows")
    if len(set(tokens)) != len(tokens):
        reader.problems.append(f"tokens appear twice in its vocabulary: {_some(_repeated(tokens))}")
    types = _per_token(reader, "tokenizer.ggml.token_type", "integers", len(tokens), int(TokenType.NORMAL)).tolist()
    if unknown := sorted(set(types) - set(TokenType)):
        reader.problems.append(f"tokens have unknown types: {', '.join(map(str, unknown[:MAX_NAMED]))}")
        known = set(TokenType)
        types = [kind if kind in known else TokenType.NORMAL for kind in types]  # so that the rest can be checked
    scores = _per_token(reader, "tokenizer.ggml.scores", "numbers", len(tokens), 0.0).astype(np.float32)
    special = {name: _token_id(reader, key, len(tokens)) for name, key in SPECIAL_KEYS.items() if reader.has(key)}
    named = [_token_id(reader, key, len(tokens)) for key in END_KEYS if reader.has(key)]
    ends = END_TEXTS - ({ENDS_A_MESSAGE} if set(tokens) >= HARMONY_ENDS else set())
    marked = (TokenType.CONTROL, TokenType.USER_DEFINED)
    by_text = [i for i, text in enumerate(tokens) if text in ends and types[i] in marked]
    for token in by_text:
        types[token] = TokenType.CONTROL
    return Vocabulary(
        tokens,
        types,
        scores,
        special,
        end_ids=tuple(dict.fromkeys((*named, *by_text))),
        adds_bos=reader.flag("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special,
        adds_eos=reader.flag("tokenizer.ggml.add_eos_token", False) and "eos_token" in special,
    )


def _per_token(reader: MetadataReader, key: str, what: str, count: int, default: float) -> NDArray[Any]:
    values, kinds = reader.metadata.get(key), "iu" if what == "integers" else "iuf"
    if values is None:
        return np.full(count, default)
    is_right = isinstance(values, np.ndarray) and values.shape == (count,) and values.dtype.kind in kinds
    if isinstance(values, np.ndarray) and is_right and np.isfinite(values).all():
        return values
    reader.problems.append(f"metadata {key} must be an array of {count} {what}, one for each token")
    return np.full(count, default)


def _token_id(reader: MetadataReader, key: str, num_tokens: int) -> int:
    token = reader.integer(key, minimum=0)
    if token >= num_tokens:
        reader.problems.append(f"metadata {key} is {token}, but its vocabulary has only {num_tokens} tokens")
        return 0
    return token


def _repeated(tokens: list[str]) -> list[str]:
    seen: set[str] = set()
    return [text for text in tokens if text in seen or seen.add(text)]  # type: ignore[func-returns-value]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(repr, names[:MAX_NAMED])) + more
