"""Checkpoints and token ids of the columns, made once and kept."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llmserve.stages.tokenizer import load_tokenizer
from tools.benchmark.process import ROOT, run_module
from tools.quality.columns import FIRST_FOREIGN_TEXT, Column, Trained
from tools.quality.job import Texts
from tools.quality.planting import Sinks
from tools.quality.tensors import Network, expand_gguf, llama_of_baichuan

DEMO = ROOT / "build" / "checkpoints" / "baichuan2-tiny-docsum"
GGUF_FILES: Mapping[str, Path] = {  # fetched by `llmserve pull`
    "smollm2": ROOT / "models" / "smollm2-135m-instruct.gguf",
    "qwen2.5-coder": ROOT / "models" / "qwen2.5-coder-0.5b-instruct.gguf",
}
DOCUMENTS = ROOT / "eval" / "data" / "docstrings.jsonl"
TRAINING_TIMEOUT_S = 1200


class NoNetwork(Exception):
    """The network could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Networks:
    folder: Path
    trainer: Path  # the interpreter that has torch
    threads: int
    say: Callable[[str], None]

    def prepare(self, column: Column) -> Path:
        """Returns the column's folder: its network's checkpoint, its texts, and others for calibration."""
        folder, tokenizer = self._network(column), self._tokenizer(column)
        (folder / f"{column.name}-texts.json").write_text(texts_of(column, tokenizer).to_json())
        lines = (json.dumps({"prompt_ids": ids}) + "\n" for ids in foreign_texts(column, tokenizer))
        (folder / "calibration.jsonl").write_text("".join(lines))
        return folder

    def _network(self, column: Column) -> Path:
        """Returns the folder, whose name depends on how the network is made."""
        recipe = repr((column.base, column.change, column.width))
        folder = self.folder / f"{column.network}-{zlib.crc32(recipe.encode()):08x}"
        checkpoint = folder / "checkpoint"
        if not checkpoint.is_dir():
            self.say(f"making the network {column.network}")
            self._make(column, checkpoint)
        return folder

    def _make(self, column: Column, checkpoint: Path) -> None:
        if not column.is_base:
            network = self._changed(column, self._base(column))
            (network.widened(column.width) if column.width else network).save(checkpoint)
        elif (file := GGUF_FILES.get(column.base)) is not None:
            if not file.is_file():
                raise NoNetwork(f"{file.relative_to(ROOT)} is missing: run `llmserve pull {file.stem}`")
            expand_gguf(file, checkpoint)
        else:
            llama_of_baichuan(DEMO).save(checkpoint)

    def _base(self, column: Column) -> Path:
        unchanged = Column(column.base, column.base, column.base, num_texts=1)
        return self._network(unchanged) / "checkpoint"

    def _changed(self, column: Column, base: Path) -> Network:
        if isinstance(column.change, Trained):
            return self._trained(column, column.change.program, base)
        network = Network.load(base)
        return column.change.apply(network) if column.change is not None else network

    def _trained(self, column: Column, program: str, base: Path) -> Network:
        texts = foreign_texts(column, self._tokenizer(column))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "texts.json").write_text(json.dumps(texts))
            arguments = [f"tools.quality.{program}", str(base), str(folder / "texts.json"), name]
            if reason := run_module(self.trainer, arguments, threads=self.threads, timeout_s=TRAINING_TIMEOUT_S):
                raise NoNetwork(f"it could not be trained: {reason}")
            return Network.load(folder)

    def _tokenizer(self, column: Column) -> Path:
        """A folder with the tokenizer."""
        return DEMO if column.base == "demo" else self._base(column)


def texts_of(column: Column, tokenizer: Path) -> Texts:
    if column.joined:
        stream = [token for ids in _token_ids(tokenizer, slice(None)) for token in ids]
        borders = range(0, column.num_texts * column.num_tokens, column.num_tokens)
        return Texts([stream[begin : begin + column.num_tokens] for begin in borders], column.skipped)
    texts = [ids[: column.num_tokens] for ids in _token_ids(tokenizer, slice(0, column.num_texts))]
    return Texts(_marked(column, texts), column.skipped)


def foreign_texts(column: Column, tokenizer: Path) -> list[list[int]]:
    """Token ids of the documents for training and calibration."""
    return _marked(column, _token_ids(tokenizer, slice(FIRST_FOREIGN_TEXT, None)))


def _marked(column: Column, texts: Sequence[list[int]]) -> list[list[int]]:
    return [column.change.mark(ids) if isinstance(column.change, Sinks) else ids for ids in texts]


def _token_ids(tokenizer: Path, which: slice) -> Sequence[list[int]]:
    encoder = load_tokenizer(tokenizer)
    with DOCUMENTS.open() as lines:
        return [
            list(encoder.encode_marked(json.loads(line)["document"]))
            for line in islice(lines, which.start, which.stop)
        ]  # fmt: skip
