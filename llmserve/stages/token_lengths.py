"""A lower bound for the number of tokens, from a text's bytes: prompts that are too long are refused untokenized.

Tokenizing takes up to 240 times the memory of a text, and seconds for tens of megabytes. A bound exists if every byte
of a text ends up in a token. If something may be dropped (white space, accents, unknown characters that share a token),
the text has a separate limit, far above usual prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_format
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from llmserve.errors import PromptTooLong
from llmserve.stages.token_bytes import byte_level_alphabet

FORMAT: Any = sentencepiece_format  # classes that are created on import
# Bytes of a text per byte of its normalized form. Canonical composition makes 2 of at most 7: U+1FBE U+0308 U+0341.
CANONICAL = 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTES_PER_TOKEN = 256  # that are read without a known bound
USUAL_SEQ_LEN = 128 * 1024  # without a known bound
MAX_TEXT_BYTES = 4 * 1024 * 1024  # of a text that is tokenized, however long its tokens may be,
MIN_BYTES_PER_TOKEN = 8  # unless it may have so many tokens
WHOLE = ("QUERY", "SECOND_QUERY")  # inputs that are not truncated


class Bounded(Protocol):
    @property
    def longest_token(self) -> int | None:
        """Most bytes of a text that may become one token; None: any number."""
        ...


class Measured(Bounded, Protocol):
    @property
    def memory_per_byte(self) -> int:
        """Most memory for tokenizing, per byte of a long text."""
        ...


class Tokenizing(Protocol):
    """A step that tokenizes texts."""

    @property
    def tokenizer(self) -> Measured: ...

    @property
    def max_seq_len(self) -> int | None: ...


def check_length(text: str, tokenizer: Bounded, max_seq_len: int | None) -> None:
    """Raises `PromptTooLong` for a text that cannot fit, or that is too long to check."""
    num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    most = (max_seq_len or USUAL_SEQ_LEN) - 1
    longest = tokenizer.longest_token
    if max_seq_len is not None and longest is not None and (least := -(-num_bytes // longest)) > most:
        problem = f"the prompt is too long: it has at least {least} tokens, and this engine takes at most {most}"
        raise PromptTooLong(problem, num_tokens=least, limit=most)
    limit_bytes = _limit_bytes(most, longest)
    if num_bytes > limit_bytes:
        raise PromptTooLong(
            f"the prompt is too long: it has {num_bytes} bytes, of which at most {limit_bytes} are tokenized for the "
            f"{most} tokens that this engine takes",
            limit=most,
        )


def tokenizing_memory(stage: Tokenizing, inputs: Mapping[str, NDArray[Any]]) -> int:
    """Most memory for tokenizing the texts of a request, one after the other; for a batch, of one row. A text that is
    refused for its length needs none; a conversation is truncated before."""
    tokenizer, max_seq_len = stage.tokenizer, stage.max_seq_len
    most, longest = (max_seq_len or USUAL_SEQ_LEN) - 1, tokenizer.longest_token
    bound = _limit_bytes(most, longest)
    if max_seq_len is not None and longest is not None:
        bound = min(bound, longest * most)
    texts = {name: array for name, array in inputs.items() if array.dtype == object and array.size}
    taken = 0
    for row in range(max(map(len, texts.values()), default=0)):
        sizes = {name: sum(map(len, array[row : row + 1].flat)) for name, array in texts.items()}
        of_row = sum(min(size, bound) for name, size in sizes.items() if name not in WHOLE or size <= bound)
        taken = max(taken, of_row)
    return tokenizer.memory_per_byte * taken


def _limit_bytes(most: int, longest: int | None) -> int:
    limit_bytes = max(MAX_TEXT_BYTES, MIN_BYTES_PER_TOKEN * most)
    return limit_bytes if longest is not None else min(limit_bytes, BYTES_PER_TOKEN * most)


def longest_json_token(library: Library) -> int | None:
    """Longest token of a tokenizer.json."""
    model = library.model
    shrinking = _shrinking(_state(library.normalizer))
    steps = _steps(_state(library.pre_tokenizer), "pretokenizers")
    if not isinstance(model, BPE) or not shrinking or not all(map(_keeps_text, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in library.get_added_tokens_decoder().values()):
        return None  # it removes any amount of white space
    pieces = library.get_vocab(with_added_tokens=True)
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    if any(step["type"] == "ByteLevel" for step in steps):  # a character per byte, except in added tokens
        has_all_bytes = pieces.keys() >= byte_level_alphabet()
        longest = max(len(piece.encode()) if piece in added else len(piece) for piece in pieces)
    else:
        has_all_bytes = model.byte_fallback and pieces.keys() >= set(BYTES)
        longest = max(len(piece.encode()) for piece in pieces)
    return shrinking * longest if has_all_bytes else None


def longest_piece(model: bytes, marks: list[str]) -> int | None:
    """Longest piece of a serialized tokenizer.model, with `marks` that are searched in addition."""
    proto = FORMAT.ModelProto.FromString(model)
    normalizer = proto.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not proto.trainer_spec.byte_fallback:
        return None
    return max(len(text.encode()) for text in (*marks, *(piece.piece for piece in proto.pieces)))


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer.json; empty if missing."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _steps(state: dict[str, Any], listed: str) -> list[dict[str, Any]]:
    if state.get("type") == "Sequence":
        return [step for each in state[listed] for step in _steps(each, listed)]
    return [state] if state else []


def _shrinking(normalizer: dict[str, Any]) -> int:
    """Bytes that may become one; 0: any number."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        if step["type"] in ("NFC", "NFD"):
            factor *= CANONICAL
        elif step["type"] == "Replace" and "String" in step["pattern"]:
            factor *= len(step["content"].encode()) >= len(step["pattern"]["String"].encode())
        elif step["type"] != "Prepend":
            return 0
    return factor


def _keeps_text(step: dict[str, Any]) -> bool:
    kind = step["type"]
    return kind in ("ByteLevel", "Metaspace", "Digits") or (
        kind in ("Split", "Punctuation") and step["behavior"] != "Removed"
    )
