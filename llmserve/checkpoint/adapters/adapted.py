"""A checkpoint with a LoRA adapter merged into it; each changed weight is computed when it is read.

Names, shapes and sums follow PEFT's `merge_and_unload`. Sums of a row are computed in one order, in float32 and element
by element, so they depend neither on the piece that is read nor on a linear-algebra library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmserve.checkpoint.adapters.files import ADAPTER_FILES, Adapter, LowRank
from llmserve.checkpoint.reader import CONFIG_NAME, MAX_LISTED, Checkpoint
from llmserve.checkpoint.stored_tensor import STRIP_ELEMENTS, Rows, Tensor, TensorInfo
from llmserve.errors import CheckpointError, raise_problems

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "tie_word_embeddings"


@dataclass(frozen=True, slots=True)
class MergedRows:
    """`base` plus the scaled product of two thin matrices; with DoRA, each row then gets a given length."""

    base: Rows
    change: LowRank

    def __getitem__(self, rows: slice, /) -> Tensor:
        change = self.change
        begin, end, _ = rows.indices(len(change.up))
        result = np.asarray(self.base[begin:end]).astype(np.float32)
        height = max(1, STRIP_ELEMENTS // max(1, result.shape[1]))
        for first in range(0, len(result), height):
            strip = result[first : first + height]
            change.add_to(strip, begin + first)
        return result


class AdaptedCheckpoint(Checkpoint):
    """`base` as changed by the adapter in `folder`. Tied embeddings that it changes are no longer tied."""

    def __init__(self, base: Checkpoint, folder: Path) -> None:
        self._base, self._adapter = base, Adapter.read(folder)
        self._untied = bool(base.config.get(TIED, HEAD not in base.tensors)) and not {EMBED, HEAD}.isdisjoint(
            (*self._adapter.changes, *self._adapter.replaced)
        )
        config = {**base.config, TIED: False} if self._untied else base.config
        super().__init__(base.path, config, base.generation_config, {})
        self._tensors = self._all_tensors()
        problems = list(self._problems())
        if len(problems) > MAX_LISTED:
            problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
        raise_problems(CheckpointError, f"adapter {folder} does not fit checkpoint {base.path}", problems)

    @property
    def file_names(self) -> tuple[str, ...]:
        return (*self._base.file_names, *ADAPTER_FILES)

    def file(self, name: str) -> Path:
        return self._adapter.folder / name if name in ADAPTER_FILES else self._base.file(name)

    @property
    def config_name(self) -> str:
        return self._base.config_name

    @property
    def is_expanded(self) -> bool:
        return True

    @property
    def has_text_files(self) -> bool:
        return self._base.has_text_files

    @property
    def surplus(self) -> Collection[str]:
        return self._base.surplus

    @property
    def rounded_shares(self) -> Mapping[str, float]:
        return self._base.rounded_shares

    def stored_name(self, name: str) -> str:
        return self._base.stored_name(name)

    def text_file(self, name: str) -> bytes | None:
        if name == CONFIG_NAME and self._untied:
            return (json.dumps(self.config, indent=2) + "\n").encode()
        return self._base.text_file(name)

    def rows(self, name: str) -> Rows:
        base: Rows | None = self._adapter.replaced.get(name)
        if base is None:
            base = self._base.rows(EMBED if self._untied and name == HEAD and HEAD not in self._base.tensors else name)
        change = self._adapter.changes.get(name)
        return base if change is None else MergedRows(base, change)

    def close(self) -> None:
        self._base.close()

    def _all_tensors(self) -> dict[str, TensorInfo]:
        found = dict(self._base.tensors)
        if self._untied and EMBED in found:
            found.setdefault(HEAD, found[EMBED])
        for name in self._adapter.replaced.keys() & found.keys():
            tensor = self._adapter.replaced[name]
            found[name] = TensorInfo(tensor.dtype.name, tensor.shape, tensor.nbytes)
        for name in self._adapter.changes.keys() & found.keys():
            shape = found[name].shape
            found[name] = TensorInfo("float32", shape, 4 * math.prod(shape))
        return found

    def _problems(self) -> Iterator[str]:
        """Problems with an adapter that was made for another network."""
        known = self._base.tensors.keys() | ({HEAD} if self._untied else set())
        shapes = [(name, change.shape) for name, change in self._adapter.changes.items()]
        shapes += [(name, tensor.shape) for name, tensor in self._adapter.replaced.items()]
        for name, shape in shapes:
            if name not in known:
                yield f"it changes {name}, but the checkpoint has no such tensor"
                continue
            base = self._base.tensors.get(name) or self._base.tensors[EMBED]
            if base.shape != shape:
                yield f"{name} has the shape {list(base.shape)} in the checkpoint, but {list(shape)} in the adapter"


def open_checkpoint(path: Path, adapter: Path | None) -> Checkpoint:
    """`Checkpoint.open`, with the LoRA adapter in that folder merged into it."""
    base = Checkpoint.open(path)
    if adapter is None:
        return base
    try:
        return AdaptedCheckpoint(base, adapter)
    except BaseException:
        base.close()
        raise
