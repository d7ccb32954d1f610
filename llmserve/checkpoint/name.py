"""The name of a checkpoint, after its folder or file."""

from __future__ import annotations

import os
from pathlib import Path


def checkpoint_name(path: Path) -> str:
    """For directories that are named after it, and for messages.

    Links are not followed: in Hugging Face's cache they lead to files that are named by their digests. A snapshot in
    that cache has the name of its repository.
    """
    absolute = Path(os.path.abspath(path))
    repository = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return absolute.name
