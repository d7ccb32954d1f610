"""How many tokens a text has at least, from its bytes alone: too long a prompt is refused before it is tokenized.

Tokenizing takes up to 240 times the memory of a text, and seconds for tens of megabytes. A bound is claimed where every
byte of a text ends up in a token. Where something may be dropped (white space, accents, unknown characters that share
a token), a text has a limit by itself, far above what prompts are.
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

FORMAT: Any = sentencepiece_format  # classes that are made when it is imported
# Bytes of a text for one of its normalized form. Canonical composition makes 2 of 7 at most: U+1FBE U+0308 U+0341.
CANONICAL = 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BYTES_PER_TOKEN = 256  # that are read where no bound is known
USUAL_SEQ_LEN = 128 * 1024  # where none is known
MAX_TEXT_BYTES = 4 * 1024 * 1024  # of a text that is tokenized, however long its tokens may be,
MIN_BYTES_PER_TOKEN = 8  # unless it may have so many tokens
WHOLE = ("QUERY", "SECOND_QUERY")  # inputs that nobody cuts


class Bounded(Protocol):
    @property
    def longest_token(self) -> int | None:
        """Bytes of a text that may become one token; None: any number."""
        ...


class Measured(Bounded, Protocol):
    @property
    def memory_per_byte(self) -> int:
        """That tokenizing takes at most, for each byte of a long text."""
        ...


class Tokenizing(Protocol):
    """A step that makes tokens of texts."""

    @property
    def tokenizer(self) -> Measured: ...

    @property
    def max_seq_len(self) -> int | None: ...


def check_length(text: str, tokenizer: Bounded, max_seq_len: int | None) -> None:
    """Raise `PromptTooLong` for a text that cannot fit, or that is too much to find out."""
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
    """Most bytes that the texts of a request take while they become tokens, one after the other; of a batch, those of
    one row. A text that is refused for its length takes nothing; a conversation is cut before."""
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
    """Of a tokenizer.json."""
    model = library.model
    shrinking = _shrinking(_state(library.normalizer))
    steps = _steps(_state(library.pre_tokenizer), "pretokenizers")
    if not isinstance(model, BPE) or not shrinking or not all(map(_keeps_text, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in library.get_added_tokens_decoder().values()):
        return None  # it takes any amount of white space along
    pieces = library.get_vocab(with_added_tokens=True)
    added = {token.content for token in library.get_added_tokens_decoder().values()}
    if any(step["type"] == "ByteLevel" for step in steps):  # a character for each byte, but in added tokens
        has_all_bytes = pieces.keys() >= byte_level_alphabet()
        longest = max(len(piece.encode()) if piece in added else len(piece) for piece in pieces)
    else:
        has_all_bytes = model.byte_fallback and pieces.keys() >= set(BYTES)
        longest = max(len(piece.encode()) for piece in pieces)
    return shrinking * longest if has_all_bytes else None


def longest_piece(model: bytes, marks: list[str]) -> int | None:
    """Of a serialized tokenizer.model, with `marks` that are looked for beside it."""
    proto = FORMAT.ModelProto.FromString(model)
    normalizer = proto.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces or not proto.trainer_spec.byte_fallback:
        return None
    return max(len(text.encode()) for text in (*marks, *(piece.piece for piece in proto.pieces)))


def _state(part: Any) -> dict[str, Any]:
    """What a part of a tokenizer.json says; empty for none."""
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
