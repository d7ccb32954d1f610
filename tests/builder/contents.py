"""What equal builds have in common: every file but those of times."""

from __future__ import annotations

from pathlib import Path

from llmserve.engine.directory.artifact import CACHE_FILE
from llmserve.engine.directory.build_time import BUILD_TIME_FILE

TIMES = {CACHE_FILE, BUILD_TIME_FILE}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name not in TIMES}
