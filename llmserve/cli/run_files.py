"""Files that `llmserve run` reads prompts from and writes token ids to, in the formats of TensorRT-LLM's run.py.

.csv   one row of token ids for each prompt
.npy   an int32 array with a row for each prompt, padded with a padding id
other  text with one prompt per line; - is standard input
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmserve.cli.output_file import check_writable
from llmserve.errors import InvalidArgument
from llmserve.stages.text import text_from_bytes

NO_PROMPT = "no prompt; give one after the engine, --input-text TEXT (repeatable) or --input-file FILE (one per line)"
RunPrompt: TypeAlias = str | tuple[int, ...]  # text, or token ids


def prompts_of(texts: Sequence[str], file: Path | None, *, pad_id: int) -> list[RunPrompt]:
    """The prompts of the command line, then those of the file; empty lines are skipped."""
    found: list[RunPrompt] = [*texts, *(_read(file, pad_id) if file else ())]
    if not found:
        raise InvalidArgument(NO_PROMPT)
    return found


def _read(file: Path, pad_id: int) -> Sequence[RunPrompt]:
    name = f"--input-file {file}"
    try:
        if file.suffix == ".npy":
            return _npy_rows(np.load(file, allow_pickle=False), pad_id, name)
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, EOFError) as error:
        raise InvalidArgument(f"{name} is not an array of numpy: {error}") from error
    lines = [line for line in text_from_bytes(data, name).splitlines() if line.strip()]
    return _csv_rows(lines, name) if file.suffix == ".csv" else lines


def _npy_rows(array: NDArray[np.generic], pad_id: int, name: str) -> list[RunPrompt]:
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} must have rows of token ids, got {array.dtype} {list(array.shape)}")
    return [tuple(token for token in row if token != pad_id) for row in array.tolist()]


def _csv_rows(lines: Sequence[str], name: str) -> list[RunPrompt]:
    try:
        return [tuple(int(token) for token in row) for row in csv.reader(lines)]
    except ValueError as error:
        raise InvalidArgument(f"{name} must have token ids, separated by commas: {error}") from error


def check_id_files(*files: Path | None) -> None:
    """Check output files before the work, and create their folders. Raises `InvalidArgument`."""
    for file in filter(None, files):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(file)


def write_ids(rows: Sequence[Sequence[int]], pad_id: int, *, csv_file: Path | None, npy_file: Path | None) -> None:
    """Write prompt and answer as rows, padded with `pad_id` to the longest. `InvalidArgument` names the file."""
    longest = max(map(len, rows))
    padded = np.array([[*row, *[pad_id] * (longest - len(row))] for row in rows], np.int32)
    for file in filter(None, (csv_file, npy_file)):
        try:
            if file is csv_file:
                with file.open("w", newline="") as stream:
                    csv.writer(stream).writerows(padded.tolist())
            else:
                with file.open("wb") as binary:
                    np.save(binary, padded)
        except OSError as error:
            raise InvalidArgument(f"{file} cannot be written: {error.strerror}") from error
