"""Networks that are changed and written: Llama's tensors by their published names, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.reader import Checkpoint

Array: TypeAlias = NDArray[np.float32]
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's guard
SAME_IN_LLAMA = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Network:
    config: Mapping[str, Any]  # of a Llama
    tensors: Mapping[str, Array]

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def save(self, folder: Path) -> None:
        """Writes a Hugging Face folder without tokenizer, completely or not at all."""
        staged = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        (staged / "config.json").write_text(json.dumps(dict(self.config), indent=2) + "\n")
        tensors = {name: np.ascontiguousarray(array, np.float32) for name, array in self.tensors.items()}
        save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)

    def widened(self, width: int) -> Network:
        """Returns a copy with MLPs padded to `width` channels: the same function, in rows that fit every format."""
        missing = width - int(self.config["intermediate_size"])
        tensors = dict(self.tensors)
        for name, array in self.tensors.items():
            if "gate_proj" in name or "up_proj" in name:
                tensors[name] = np.pad(array, ((0, missing), (0, 0)))
            elif "down_proj" in name:
                tensors[name] = np.pad(array, ((0, 0), (0, missing)))
        return Network({**self.config, "intermediate_size": width}, tensors)

    @classmethod
    def load(cls, folder: Path) -> Network:
        tensors = {name: array.astype(np.float32) for name, array in load_file(folder / "model.safetensors").items()}
        return cls(json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32"}, tensors)


def llama_of_baichuan(folder: Path) -> Network:
    """Converts the demo network to a Llama, which all contestants support: splits W_pack, normalizes the head."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Array] = {}
    for name, stored in load_file(folder / "model.safetensors").items():
        array = stored.astype(np.float32)
        if name.endswith("W_pack.weight"):
            parts = zip(("q_proj", "k_proj", "v_proj"), np.split(array, 3), strict=True)
            tensors |= {name.replace("W_pack", part): rows for part, rows in parts}
        elif name == "lm_head.weight" and config["norm_head"]:
            tensors[name] = array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), SMALLEST_NORM)
        else:
            tensors[name] = array
    same = {key: config[key] for key in SAME_IN_LLAMA}
    return Network({**same, **LLAMA, "num_key_value_heads": config["num_attention_heads"]}, tensors)


def expand_gguf(file: Path, folder: Path) -> None:
    """Writes the expanded values of a GGUF file, with its tokenizer."""
    staged = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    with Checkpoint.open(file) as checkpoint:
        write_expanded(checkpoint, staged)
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)
