"""Converts text to token ids and back, for each file format of vocabularies.

`load_tokenizer` takes `tokenizer.json` (the `tokenizers` library) or `tokenizer.model` (sentencepiece). With both,
`tokenizer.json` is used, except for Baichuan, whose own tokenizer is the sentencepiece one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from llmserve.errors import CheckpointError
from llmserve.stages.bpe_tokenizer import JsonTokenizer
from llmserve.stages.files import TextFiles
from llmserve.stages.piece_tokenizer import PieceTokenizer


class Tokenizer(Protocol):
    """Thread-safe and immutable. Ids outside the vocabulary decode to nothing."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def longest_token(self) -> int | None:
        """Most bytes of a text that may become one token; None: any number."""
        ...

    @property
    def memory_per_byte(self) -> int:
        """Most memory for tokenizing, per byte of a long text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False, banned: Collection[int] = ()) -> list[int]:
        """Ids of `text`. Text never produces an id in `banned` (such as a role token): its spelling becomes ordinary
        characters.
        """
        ...

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text with spelled special tokens, as written by chat templates: each becomes its id."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def decode_stable(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The part of `decode(ids)` that no further id can change: without an incomplete character."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id, which may be part of a character; for a special token, its spelling."""
        ...

    def written_bytes(self) -> Sequence[bytes | None]:
        """The bytes that each token writes into a text; None for special tokens, and if unknown."""
        ...


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an engine directory or a checkpoint. `CheckpointError` if its files are missing or corrupt."""
    return tokenizer_of(TextFiles.read(path))


def reads_json(files: TextFiles) -> bool:
    """Whether `tokenizer.json` is used."""
    has_json, has_model = ((files.path / f"tokenizer.{suffix}").is_file() for suffix in ("json", "model"))
    return has_json and not (has_model and files.tokenizer_class.startswith("Baichuan"))


def advice_on_tekken(folder: Path) -> str:
    """For Mistral's models with a file that only its own library and transformers read; empty for other folders."""
    if not (folder / "tekken.json").is_file():
        return ""
    return (
        "tekken.json is not read, but transformers 5 converts it: in Python, "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def tokenizer_of(files: TextFiles) -> Tokenizer:
    if reads_json(files):
        return JsonTokenizer.load(files)
    if not (files.path / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{files.path} has no tokenizer: expected tokenizer.model or tokenizer.json; "
            f"{advice_on_tekken(files.path) or 'copy it from the checkpoint'}"
        )
    return PieceTokenizer.load(files)
