"""Stores the results of rollouts across restarts of the server: `.rollout.json` next to `config.pbtxt`.

Only for models whose configs have rules. Triton and polls ignore the file.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from llmserve.serving.loading.repository import DirectoryRepository, ModelSource

FILE_NAME = ".rollout.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Remembered:
    stable: int = 0  # the version that answers; 0: not known
    refused: str = ""  # digest of the files of a candidate that was rolled back


def digest_of(source: ModelSource) -> str:
    """A digest that changes with any served file of the model."""
    return sha256(repr(source.served_stamp).encode()).hexdigest()


def read_memory(path: Path) -> Remembered:
    """The stored results; empty if there is no such file or it is invalid."""
    try:
        content = json.loads((path / FILE_NAME).read_text())
        return Remembered(int(content["stable"]), str(content["refused"]))
    except FileNotFoundError:
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is ignored, so the newest version is served: %s", path / FILE_NAME, error)
        return Remembered()


def write_memory(source: ModelSource, remembered: Remembered) -> str:
    """Store the results. Returns why that failed; "": it did not, or nothing has changed."""
    if not isinstance(source.repository, DirectoryRepository):
        return "the repository is not a directory"
    file = source.path / FILE_NAME
    text = json.dumps({"stable": remembered.stable, "refused": remembered.refused}) + "\n"
    try:
        if file.exists() and file.read_text() == text:
            return ""
        beside = file.with_name(f"{FILE_NAME}.new")
        beside.write_text(text)
        beside.replace(file)
    except OSError as error:
        return str(error)
    return ""
