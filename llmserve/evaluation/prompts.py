"""Prompts as token ids, by the same stage that serves them: both sides of a comparison read the same ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from llmserve.engine.artifact import GENERATION_CONFIG_FILE, TOKENIZER_FILES, hash_file
from llmserve.evaluation.answers import Sample
from llmserve.stages.chat import Message
from llmserve.stages.preprocess import PreparedPrompt, Preprocessor, TextPrompt


class PromptEncoder:
    """Of a checkpoint or of an engine directory, with room for an answer of `max_tokens`."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self._preprocessor = Preprocessor.open(path)
        self._max_tokens = max_tokens

    def encode(self, prompt: str | tuple[Message, ...]) -> PreparedPrompt:
        if isinstance(prompt, str):
            return self._preprocessor.prepare(TextPrompt(text=prompt, max_tokens=self._max_tokens))
        return self._preprocessor.prepare(TextPrompt(messages=prompt, max_tokens=self._max_tokens))

    def count_ids(self, prompt: str | tuple[Message, ...]) -> int:
        return len(self.encode(prompt).input_ids)

    def encode_samples(self, samples: Sequence[Sample]) -> list[PreparedPrompt]:
        return [self.encode(sample.prompt) for sample in samples]


def end_ids(prompt: PreparedPrompt) -> tuple[int, ...]:
    """Every id that ends an answer by itself."""
    return (prompt.end_id, *(word[0] for word in prompt.stop_words if len(word) == 1))


def ids_digest(prompt: PreparedPrompt) -> str:
    """Names a prompt by its ids and by the ids that end its answer; 16 hexadecimal digits."""
    parts = (prompt.input_ids, sorted(end_ids(prompt)))
    text = ";".join(",".join(map(str, ids)) for ids in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_digest(path: Path) -> str:
    """SHA-256 (hex) over a checkpoint's files between text and ids: vocabulary, special tokens, end and role ids."""
    names = sorted((*TOKENIZER_FILES, GENERATION_CONFIG_FILE))
    files = [f"{name} {hash_file(path / name)}" for name in names if (path / name).is_file()]
    return hashlib.sha256("\n".join(files).encode()).hexdigest()
