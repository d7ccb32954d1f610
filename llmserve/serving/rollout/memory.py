"""What a server remembers of its rollouts when it is started again: `.rollout.json` beside `config.pbtxt`.

Only of models whose configs have rules. Triton, and polls, take no notice of such a file.
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
    refused: str = ""  # the files that a candidate was rolled back with: their digest


def digest_of(source: ModelSource) -> str:
    """Changes with any file of the model that is served."""
    return sha256(repr(source.served_stamp).encode()).hexdigest()


def read_memory(path: Path) -> Remembered:
    """Nothing, when there is no such file or it cannot be understood."""
    try:
        content = json.loads((path / FILE_NAME).read_text())
        return Remembered(int(content["stable"]), str(content["refused"]))
    except FileNotFoundError:
        return Remembered()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is ignored, so the newest version is served: %s", path / FILE_NAME, error)
        return Remembered()


def write_memory(source: ModelSource, remembered: Remembered) -> str:
    """Why that could not be done; "": it was, or there is nothing new."""
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
