"""Calibration data: the user's text that the network reads before its weights are rounded. All of it is checked first.

Each line of the file is a JSON object with "text", with "messages", to which the checkpoint's chat format is applied,
or with "prompt_ids". The first MOST_TOKENS tokens are used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.builder.calibration.encoder import Encoder, Ids
from llmserve.engine.directory.manifest import Calibration
from llmserve.errors import CheckpointError, InvalidArgument, NotFound, RecipeError, Unsupported, raise_problems

MOST_TOKENS = 8_000  # twice as many gain nothing measurable, and a network of 7B reads for 10 minutes
LONGEST = 1024  # tokens that are read as one text; longer texts are split
ENOUGH_TOKENS = 2_000  # fewer say little about sums of products
MOST_LISTED = 20  # problems listed at most; a wrong file has one in every line
KEYS = ("text", "messages", "prompt_ids")


@dataclass(frozen=True, slots=True)
class CalibrationText:
    sha256: str  # of the file
    texts: tuple[Ids, ...]
    num_lines: int
    num_lines_used: int

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def facts(self) -> Calibration:
        """Facts for the manifest."""
        return Calibration(self.sha256, self.num_tokens, self.num_lines_used)

    @property
    def notes(self) -> list[str]:
        found = []
        if self.num_lines_used < self.num_lines or self.num_tokens == MOST_TOKENS:
            found.append(
                f"calibration: the first {self.num_tokens:,} tokens are used ({self.num_lines_used:,} of "
                f"{self.num_lines:,} lines); the rest has no effect"
            )
        if self.num_tokens < ENOUGH_TOKENS:
            found.append(f"calibration: {self.num_tokens:,} tokens are few; use {ENOUGH_TOKENS:,} to {MOST_TOKENS:,}")
        return found


def read_calibration(
    path: Path,
    encoder: Encoder,
    *,
    max_seq_len: int = LONGEST,
    name: str = "calibration data",
    most_tokens: int | None = None,
) -> CalibrationText:
    """Raise `RecipeError` with everything that is wrong with the file, or `NotFound`; they say what it is, `name`.

    All lines are checked, but only those that are used are encoded.
    """
    longest = min(LONGEST, max_seq_len)
    digest = hashlib.sha256()
    texts: list[Ids] = []
    problems: list[str] = []
    left, num_lines, num_used = most_tokens or MOST_TOKENS, 0, 0
    for number, line in enumerate(_lines(path, name), 1):
        digest.update(line)
        if not line.strip():
            continue
        num_lines += 1
        try:
            key, value = _entry(line)
            if left:
                ids = _encode(encoder, key, value)[:left]
                texts += [ids[begin : begin + longest] for begin in range(0, len(ids), longest)]
                left -= len(ids)
                num_used += 1
        except CheckpointError as error:  # the same error for every line
            problems.append(f"line {number}: {error}")
            break
        except (InvalidArgument, Unsupported) as error:
            problems.append(f"line {number}: {error}")
            if len(problems) == MOST_LISTED:
                problems.append("there may be more problems in the lines that follow")
                break
    if not num_lines:
        problems.append('it has no lines; write lines of {"text": ...}, {"messages": [...]} or {"prompt_ids": [...]}')
    raise_problems(RecipeError, f"{name} {path} cannot be used", problems)
    return CalibrationText(digest.hexdigest(), tuple(texts), num_lines, num_used)


def _lines(path: Path, name: str) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except FileNotFoundError:
        raise NotFound(f"{name} {path} does not exist") from None
    except OSError as error:
        raise RecipeError(f"{name} {path} cannot be read: {error.strerror}") from error


def _entry(line: bytes) -> tuple[str, Any]:
    """The key and the value of a line, or what is wrong with it."""
    try:
        content = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"it must be an object, found {type(content).__name__}")
    if len(content) != 1 or not content.keys() <= set(KEYS):
        named = ", ".join(map(repr, content)) or "none"
        raise InvalidArgument(f"it must have one key, {', '.join(KEYS[:-1])} or {KEYS[-1]}, but has {named}")
    ((key, value),) = content.items()
    if key == "text" and not isinstance(value, str):
        raise InvalidArgument(f"text must be a string, found {type(value).__name__}")
    if not value or (key == "text" and not value.strip()):
        raise InvalidArgument(f"{key} is empty")
    return key, value


def _encode(encoder: Encoder, key: str, value: Any) -> Ids:
    ids = {"text": encoder.text, "messages": encoder.messages, "prompt_ids": encoder.prompt_ids}[key](value)
    if not ids:
        raise InvalidArgument(f"{key} has no tokens")
    return ids
