"""Qwen3 (dense): Llama with a norm on every head of q and k, its own head size, and Qwen2's sliding windows."""

from __future__ import annotations

from dataclasses import replace

from llmserve.models.config import ConfigReader
from llmserve.models.family import FamilySpec, HeadNorm, family, read_family
from llmserve.models.spec import HfConfig
from llmserve.models.windows import read_windows

DEFAULT_HEAD_DIM = 128  # transformers' default


def from_hf(config: HfConfig) -> FamilySpec:
    reader = ConfigReader({"head_dim": DEFAULT_HEAD_DIM} | dict(config))
    spec = read(reader, "Qwen3ForCausalLM")
    reader.finish()
    return spec


def read(reader: ConfigReader, architecture: str) -> FamilySpec:
    """Read the keys that Qwen3-MoE shares."""
    spec = read_family(reader, architecture)
    windows = read_windows(reader, spec.num_layers)
    bias = reader.flag("attention_bias")
    reader.expect("mlp_bias", False)
    return replace(spec, windows=windows, qkv_bias=bias, output_bias=bias, head_norm=HeadNorm.HEADS)


ARCHITECTURE = family("Qwen3ForCausalLM", "qwen3", from_hf)
