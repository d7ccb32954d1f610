"""Text to token ids and back, whatever file the vocabulary comes in.

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
        """Bytes of a text that may become one token; None: any number."""
        ...

    @property
    def memory_per_byte(self) -> int:
        """That tokenizing takes at most, for each byte of a long text."""
        ...

    def encode(self, text: str, add_special_tokens: bool = False, banned: Collection[int] = ()) -> list[int]:
        """Ids of `text`. An id in `banned` (a role token, say) never comes out of text: its spelling in `text` becomes
        ordinary characters.
        """
        ...

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are spelled out, as chat templates write them: each becomes its id."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def decode_stable(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The part of `decode(ids)` that no further id can change: without a character still in the making."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one id stands for by itself: a part of a character maybe, and a special token's own spelling."""
        ...

    def written_bytes(self) -> Sequence[bytes | None]:
        """What each token writes into a text; None for special tokens, and where nothing is known."""
        ...


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of an engine directory or a checkpoint. `CheckpointError` when its files are missing or corrupt."""
    return tokenizer_of(TextFiles.read(path))


def reads_json(files: TextFiles) -> bool:
    """Whether the tokenizer is that of `tokenizer.json`."""
    has_json, has_model = ((files.path / f"tokenizer.{suffix}").is_file() for suffix in ("json", "model"))
    return has_json and not (has_model and files.tokenizer_class.startswith("Baichuan"))


def advice_on_tekken(folder: Path) -> str:
    """Mistral has models with a file that only its own library and transformers read; empty for other folders."""
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
