"""LoRA adapters beside a sound checkpoint."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.safetensors_file import DTYPE_NAMES
from llmserve.checkpoint.stored_tensor import DTYPES
from tests.checkpoints import make_checkpoint
from tests.fuzz.inputs import edited, encoded

MAX_VALUES = 1 << 16
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "use_dora": False, "target_modules": ["q_proj"],
    "rank_pattern": {}, "alpha_pattern": {"^model.layers.0.*": 3}, "init_lora_weights": True, "bias": "none",
    "modules_to_save": None,
}  # fmt: skip
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS: dict[str, Any] = {
    f"{MODULE}.lora_A.weight": ["F32", [2, 32]], f"{MODULE}.lora_B.weight": ["F16", [32, 2]],
    f"{MODULE}.lora_magnitude_vector": ["BF16", [32]], "base_model.model.lm_head.weight": ["F32", [300, 32]],
    "base_model.model.model.embed_tokens.lora_embedding_A": ["F32", [2, 300]],
    "base_model.model.model.embed_tokens.lora_embedding_B": ["F32", [32, 2]],
}  # fmt: skip
NAMES = (*CONFIG, *TENSORS, ".lora_", "(a+)+b", ".*.*.*.*", "q_proj", "F8_E4M3", "I32", MODULE)


@cache
def base() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="fuzz-base-")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    make_checkpoint(Path(folder.name), "llama", **sizes)
    return folder


def read_adapter(folder: Path, config: bytes, listed: bytes, values: bytes) -> None:
    """`listed`: types and shapes of tensors, whose bytes are `values` again and again."""
    (folder / "adapter_config.json").write_bytes(config)
    header: dict[str, Any] = {}
    end = 0
    with suppress(ValueError, AttributeError, TypeError, RecursionError, KeyError):
        for name, (dtype, shape) in json.loads(listed).items():
            if not all(type(number) is int and number >= 0 for number in shape):
                continue
            if (size := math.prod(shape) * DTYPES[DTYPE_NAMES[dtype]].itemsize) <= MAX_VALUES:
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
    text = encoded(header)
    content = (values or b"\0") * (end // max(1, len(values)) + 1)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[:end])
    with open_checkpoint(Path(base().name), folder) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)


@st.composite
def adapters(draw: st.DrawFn) -> tuple[bytes, bytes, bytes]:
    """Config, tensors and values."""
    config = {**CONFIG, "use_dora": draw(st.booleans())}
    kept = {name: TENSORS[name] for name in draw(st.sets(st.sampled_from(sorted(TENSORS)), min_size=1))}
    values = draw(st.sampled_from([b"\x11", b"\0", b"\xff\x7f", b"\x01\x3c\x12"]))
    listed = encoded(draw(st.just(kept) | edited(kept, NAMES)))
    return encoded(draw(st.just(config) | edited(config, NAMES))), listed, values
