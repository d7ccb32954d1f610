"""A GGUF file, or its parts, as a checkpoint: config, tokenizer and tensors under Hugging Face's names."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.checkpoint.gguf.architectures import gguf_architecture
from llmserve.checkpoint.gguf.config import config_of
from llmserve.checkpoint.gguf.described import Described
from llmserve.checkpoint.gguf.encoders import pooling_files
from llmserve.checkpoint.gguf.header import StoredBlocks
from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.gguf.parts import open_parts
from llmserve.checkpoint.gguf.rows import ExpandedRows, JoinedHeads, JoinedMatrices, JoinedRows
from llmserve.checkpoint.gguf.states import CONVOLUTIONS, DECAY, FLAT, restored
from llmserve.checkpoint.gguf.tensor_names import BLOCK_TENSOR, BOTH_GATES, EXPERT, LAYERS, MTP, MTP_LAYER, SHARED_GATE
from llmserve.checkpoint.gguf.text_files import text_files
from llmserve.checkpoint.gguf.vocabulary import SPECIAL_KEYS
from llmserve.checkpoint.rearranged import ReorderedRows, RowDifference, pair_order
from llmserve.checkpoint.stored_tensor import DTYPES, Rows, Tensor, TensorInfo
from llmserve.errors import CheckpointError, Unsupported, raise_problems

MAX_FACTORS = 1 << 16
MAX_EXPERTS = 10_000
SCORE, YES_AND_NO = "score.weight", (0, 1)  # of a reranker: its tensor, and the rows that are subtracted
ROW = "moe_statics.e_score_correction_bias"
ID_KEYS = {f"{name}_id": SPECIAL_KEYS[name] for name in ("bos_token", "eos_token", "pad_token")}


class GgufFile:
    """Opening reads and checks the whole header, of every part; the data is mapped into memory.

    `with_tokenizer` False: the tokenizer comes from elsewhere, and the file's tokenizer may be of any kind.
    """

    def __init__(self, path: Path, *, with_tokenizer: bool = True) -> None:
        stored = open_parts(path)
        self.paths, self._contents, self._stored = stored.paths, stored.contents, stored.tensors
        try:
            reader = MetadataReader(stored.metadata, str(stored.metadata.get("general.architecture", "")))
            num_experts = stored.metadata.get(reader.key("{}.expert_count"), 0)
            name = stored.metadata.get("general.architecture")
            self._architecture = gguf_architecture(name, num_experts, self._stored)
            self.config: dict[str, Any] = self._read_config(reader)
            self._drafting = self._drafting_names(reader)
            self._tensors = {hf: self._info(name) for name in self._wanted() for hf in self._hf_names(name)}
            texts = text_files(reader, self.config["vocab_size"]) if with_tokenizer else {}
            texts |= pooling_files(reader, self._stored)
            raise_problems(CheckpointError, path.name, reader.problems)
        except Unsupported as error:
            raise Unsupported(f"{path.name}: {error}") from error
        self.generation_config: dict[str, Any] = json.loads(texts.get("generation_config.json", b"{}"))
        self.texts = {**texts, "config.json": (json.dumps(self.config, indent=2) + "\n").encode()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def rounded_shares(self) -> Mapping[str, float]:
        """The share of numbers in each of ggml's quantized types."""
        counted: Counter[str] = Counter()
        for tensor in self._stored.values():
            counted[tensor.kind.name if tensor.kind.expand else ""] += math.prod(tensor.shape)
        return {name: count / counted.total() for name, count in sorted(counted.items()) if name}

    def read(self, name: str) -> Rows:
        name = self._in_blocks(name)
        if joined := self._joined(name):
            return joined
        stored_name = self._architecture.to_gguf(name)
        stored = self._stored[stored_name]
        packed = self._packed(stored)
        if expert := EXPERT.search(name):
            packed = packed.reshape(stored.shape[0], -1)[int(expert[0])]
        if name == SCORE:
            return RowDifference(ExpandedRows(packed, stored.kind, stored.shape), YES_AND_NO)
        rows = ExpandedRows(packed, stored.kind, self._shape(stored_name), self._shift(stored_name))
        if not self._architecture.is_interleaved(name):
            return restored(self._architecture, name, rows, self.config)
        heads = self.config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        head_dim = stored.shape[0] // heads
        return ReorderedRows(rows, pair_order(stored.shape[0], head_dim, head_dim))

    def _joined(self, name: str) -> JoinedRows | JoinedHeads | JoinedMatrices | None:
        """None for a single tensor. If parts are missing or do not fit, the shape is that of the first part."""
        if (found := self._architecture.joined_of(name)) is None:
            return None
        joined, parts = found[0], [self._stored.get(part) for part in found[1]]
        stored = [part for part in parts if part is not None]
        shapes = [part.shape for part in stored]
        if joined.of_heads and [len(shape) for shape in shapes] == [3, 3]:
            heads, columns, _ = shapes[0]
            fits = shapes[1][::2] == (heads, columns)
        else:
            fits = len(stored) == len(parts) and len({*shapes}) == 1 and 2 <= len(shapes[0]) <= 3
        if not fits:
            return None
        rows = [ExpandedRows(self._packed(part), part.kind, part.shape) for part in stored]
        if joined.of_heads:
            return JoinedHeads(*rows)
        if joined.is_matrix:
            return JoinedMatrices(rows)
        return JoinedRows(rows, joined.is_transposed and len(stored[0].shape) == 3, joined.in_turns)

    def stored_name(self, name: str) -> str:
        return self._architecture.to_gguf(self._in_blocks(name))

    def close(self) -> None:
        self._contents = [np.empty(0, np.uint8)] * len(self._contents)

    def _read_config(self, reader: MetadataReader) -> dict[str, Any]:
        shapes = {name: stored.shape for name, stored in self._stored.items()}
        factors: dict[str, Tensor] = {}
        for name in self._architecture.factors:
            if name in self._stored and math.prod(shapes[name]) <= MAX_FACTORS:
                factors[name] = ExpandedRows(self._packed(self._stored[name]), self._stored[name].kind, shapes[name])[:]
            elif name in self._stored:
                reader.problems.append(f"tensor {name} has the shape {list(shapes[name])}")
        reader.problems += [
            f"tensor {name} has a name that GGUF files do not use; convert the original model with llama.cpp"
            for name in shapes
            if not self._architecture.knows(name)
        ]
        if "token_embd.weight" not in shapes:
            reader.problems.append("it has no tensor token_embd.weight")
        config = config_of(Described(reader, self._architecture, shapes, factors))
        # null if missing, since transformers has its own defaults for some families
        return config | {
            name: reader.integer(key, minimum=0) if reader.has(key) else None for name, key in ID_KEYS.items()
        }

    def _wanted(self) -> list[str]:
        """Tensors without those that belong to the config, and without blocks that draft tokens."""
        wanted = [name for name in self._stored if name not in self._architecture.factors]
        if not self._architecture.drops_drafting:
            return wanted
        blocks = ((name, BLOCK_TENSOR.fullmatch(name)) for name in wanted)
        count = self.config["num_hidden_layers"] + bool(self._drafting)
        return [name for name, found in blocks if not found or int(found[1]) < count]

    def _drafting_names(self, reader: MetadataReader) -> dict[str, str]:
        """The prefix of the drafting block's tensors if it were part of the network, and its own prefix."""
        if not self._architecture.has_mtp or reader.integer("{}.nextn_predict_layers", 0, minimum=0) != 1:
            return {}
        block = f"{LAYERS}.{self.config['num_hidden_layers']}."
        return {f"{block}{module}.": f"{own}." for module, own in MTP.items()} | {block: f"{MTP_LAYER}."}

    def _in_blocks(self, name: str) -> str:
        """The inverse of `_published`."""
        found = ((place, own) for place, own in self._drafting.items() if name.startswith(own))
        return next((place + name.removeprefix(own) for place, own in found), name)

    def _published(self, name: str) -> str:
        found = ((place, own) for place, own in self._drafting.items() if name.startswith(place))
        return next((own + name.removeprefix(place) for place, own in found), name)

    def _hf_names(self, stored_name: str) -> list[str]:
        """The tensor's name, or one name for each expert."""
        name = self._published(self._architecture.to_hf(stored_name))
        if f".{BOTH_GATES}." in stored_name:
            return [name.replace("in_proj_ba", f"in_proj_{gate}") for gate in "ba"]
        count = self._stored[stored_name].shape[0] if self._has_experts(stored_name) else 0
        return [name.replace("*", str(expert)) for expert in range(count)] or [name]

    def _has_experts(self, stored_name: str) -> bool:
        """True for experts or norms of heads. A tensor that cannot have them keeps a name without a place in the
        plan."""
        shape, name = self._stored[stored_name].shape, self._architecture.to_hf(stored_name)
        return "*" in name and len(shape) == 3 - (".norms." in name) and shape[0] <= MAX_EXPERTS

    def _shape(self, stored_name: str) -> tuple[int, ...]:
        """The shape of each tensor that it contains. Converters omit the only row of a shared expert's gate and of
        ERNIE's correction, and the only channel of a convolution."""
        shape, name_of_hf = self._stored[stored_name].shape, self._architecture.to_hf(stored_name)
        if self._has_experts(stored_name):
            return shape[1:]
        if name_of_hf == SCORE and len(shape) == len(YES_AND_NO) == shape[0]:
            return (1, *shape[1:])
        if len(shape) == 2 and name_of_hf.endswith(CONVOLUTIONS):
            return (shape[0], 1, shape[1])
        if stored_name.endswith(FLAT):
            return (math.prod(shape),)
        is_row = f".{SHARED_GATE}." in stored_name or name_of_hf.endswith(ROW)
        return (1, *shape) if is_row and len(shape) == 1 else shape

    def _packed(self, stored: StoredBlocks) -> Any:
        return self._contents[stored.part][stored.offset : stored.offset + stored.num_bytes]

    def _shift(self, stored_name: str) -> float:
        is_shifted = stored_name.endswith("norm.weight") and not stored_name.endswith(FLAT)
        return self._architecture.norm_shift if is_shifted else 0.0

    def _info(self, stored_name: str) -> TensorInfo:
        if joined := self._joined(self._architecture.to_hf(stored_name)):
            return TensorInfo("float32", joined.shape, math.prod(joined.shape) * 4)
        stored, shape = self._stored[stored_name], self._shape(stored_name)
        if f".{BOTH_GATES}." in stored_name:
            shape = (shape[0] // 2, *shape[1:])
        is_computed = self._architecture.to_hf(stored_name).endswith((DECAY, SCORE))
        is_plain = stored.kind.expand is None and not self._shift(stored_name) and not is_computed
        layouts = {layout: name for name, layout in DTYPES.items()}
        dtype = layouts[stored.kind.layout] if is_plain else "float32"
        return TensorInfo(dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize)
