"""Converts prompts to ids before the engine exists, exactly as the engine's own preprocessing will."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from llmserve.checkpoint.name import checkpoint_name
from llmserve.checkpoint.reader import CONFIG_NAME, GENERATION_CONFIG_NAME, TOKENIZER_NAMES, Checkpoint
from llmserve.core import TOKENIZER_FILES
from llmserve.errors import CheckpointError, InvalidArgument
from llmserve.owned_directory import temporary_directory
from llmserve.stages.chat import parse_messages
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from llmserve.stages.tokenizer import advice_on_tekken

LEAST_KNOWN = 0.95
TEMPORARY_PREFIX = "llmserve-tokenizer-"

Ids: TypeAlias = tuple[int, ...]


class Encoder:
    """Reads the tokenizer on first use. Raises `CheckpointError` if there is none or it is corrupt."""

    def __init__(self, checkpoint: Checkpoint, vocab_size: int) -> None:
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._preprocessor: Preprocessor | None = None

    def text(self, text: str) -> Ids:
        return self._encode(TextPrompt(text=text))

    def messages(self, messages: Any) -> Ids:
        """Ids of messages, given as parsed JSON."""
        return self._encode(TextPrompt(messages=parse_messages(json.dumps(messages))))

    def prompt_ids(self, ids: Any) -> Ids:
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise InvalidArgument("prompt_ids must be a list of token ids")
        return self._known(tuple(ids))

    def end_ids(self) -> Ids:
        """Tokens that end an answer; empty if there is no tokenizer."""
        found = self.preprocessor().end_ids if self._has_tokenizer else ()
        return tuple(token for token in found if 0 <= token < self._vocab_size)

    def require_readable(self) -> None:
        """Raise if the checkpoint has an unreadable tokenizer: its engine could not serve."""
        if self._has_tokenizer:
            self.preprocessor()

    def notes(self) -> list[str]:
        """Notes about the checkpoint's end tokens, and about ids without text."""
        if not self._has_tokenizer:
            without = f"no {' or '.join(TOKENIZER_NAMES)}: this engine accepts token ids, but no text"
            return ["; ".join(filter(None, (without, advice_on_tekken(self._checkpoint.path))))]
        found = [
            f"eos_token_id {token} is not one of the network's ids, 0 to {self._vocab_size - 1}: no answer ends with it"
            for token in self.preprocessor().declared_end_ids
            if not 0 <= token < self._vocab_size
        ]
        num_pieces = self.preprocessor().tokenizer.vocab_size
        if LEAST_KNOWN * self._vocab_size <= num_pieces <= self._vocab_size:  # tables are often a little larger
            return found
        return [
            *found,
            f"the tokenizer has {num_pieces:,} pieces, but the network {self._vocab_size:,}; check that they belong "
            "together. Ids that only one of them has cannot be read or written",
        ]

    @property
    def _has_tokenizer(self) -> bool:
        return any(self._checkpoint.text_file(name) is not None for name in TOKENIZER_NAMES)

    def _encode(self, prompt: TextPrompt) -> Ids:
        return self._known(self.preprocessor().prepare(prompt).input_ids)

    def preprocessor(self) -> Preprocessor:
        if self._preprocessor is None:
            self._preprocessor = _open_preprocessor(self._checkpoint)
        return self._preprocessor

    def _known(self, ids: Ids) -> Ids:
        if unknown := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise InvalidArgument(f"token id {unknown[0]} is not one of the network's {self._vocab_size:,}")
        return ids


def _open_preprocessor(checkpoint: Checkpoint) -> Preprocessor:
    """Opens the tokenizer in a temporary folder, because a GGUF file contains it."""
    if all(checkpoint.text_file(name) is None for name in TOKENIZER_NAMES):
        raise CheckpointError(f"{checkpoint.path} has no tokenizer ({' or '.join(TOKENIZER_NAMES)}); give prompt_ids")
    with temporary_directory(TEMPORARY_PREFIX) as parent:
        folder = parent / checkpoint_name(checkpoint.path)
        folder.mkdir()
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG_NAME, CONFIG_NAME):
            checkpoint.copy_text_file(name, folder / name)
        try:
            return Preprocessor.open(folder)
        except CheckpointError as error:  # names a file of the temporary folder
            raise CheckpointError(str(error).replace(str(folder), str(checkpoint.path))) from error
