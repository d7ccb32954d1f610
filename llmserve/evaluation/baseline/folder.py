"""Provides a checkpoint as a folder that transformers can load.

A GGUF file or a quantized folder is written as such a folder, in float32, with the values that its numbers represent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.checkpoint.expanded import expanded_bytes, write_expanded, write_text_files
from llmserve.checkpoint.name import checkpoint_name
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import ResourceExhausted
from llmserve.owned_directory import temporary_directory

PREFIX = "llmserve-expanded-"


@contextmanager
def text_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """A folder with the text files."""
    if checkpoint.has_text_files:
        yield checkpoint.path
        return
    with temporary_directory(PREFIX) as parent:
        folder = parent / checkpoint_name(checkpoint.path)  # named in errors
        write_text_files(checkpoint, folder)
        yield folder


@contextmanager
def model_folder(checkpoint: Checkpoint, phase: Callable[[str, int], Callable[[int], None]]) -> Iterator[Path]:
    """The folder including weights. `phase` begins a phase if they are written. `ResourceExhausted`: disk full."""
    if not checkpoint.is_expanded:
        yield checkpoint.path
        return
    with temporary_directory(PREFIX) as folder:
        needed, free = expanded_bytes(checkpoint), shutil.disk_usage(folder).free
        if free < needed:
            raise ResourceExhausted(
                f"{checkpoint.path} in float32 needs {needed / 2**30:.1f} GiB; {folder.parent} has {free / 2**30:.1f} "
                "GiB free; name another folder with TMPDIR"
            )
        write_expanded(checkpoint, folder, phase("expand", len(checkpoint.tensors) - len(checkpoint.surplus)))
        yield folder
