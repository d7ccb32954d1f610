"""A checkpoint as the baseline reads it: a folder that transformers loads.

A GGUF file or a quantized folder is written out as one, in float32: its baseline is what its numbers stand for.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmserve.checkpoint.expanded import expanded_bytes, write_expanded, write_text_files
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import ResourceExhausted
from llmserve.owned_directory import temporary_directory

PREFIX = "llmserve-expanded-"


@contextmanager
def text_folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """With the files of its texts."""
    if checkpoint.has_text_files:
        yield checkpoint.path
        return
    with temporary_directory(PREFIX) as parent:
        folder = parent / checkpoint.path.resolve().name  # which errors name
        write_text_files(checkpoint, folder)
        yield folder


@contextmanager
def model_folder(checkpoint: Checkpoint, phase: Callable[[str, int], Callable[[int], None]]) -> Iterator[Path]:
    """With its weights, too. `phase` begins one where they have to be written out. `ResourceExhausted`: no room."""
    if not checkpoint.is_expanded:
        yield checkpoint.path
        return
    with temporary_directory(PREFIX) as folder:
        needed, free = expanded_bytes(checkpoint), shutil.disk_usage(folder).free
        if free < needed:
            raise ResourceExhausted(
                f"{checkpoint.path} in float32 takes {needed / 2**30:.1f} GiB, {folder.parent} has {free / 2**30:.1f} "
                "GiB free; name another folder with TMPDIR"
            )
        write_expanded(checkpoint, folder, phase("expand", len(checkpoint.tensors) - len(checkpoint.surplus)))
        yield folder
