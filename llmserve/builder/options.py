"""What the user asked a build for, resolved and frozen. Names follow trtllm-build where a name exists."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32")
QUANTIZATIONS = ("", "int8")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    dtype: str = "float16"
    quantization: str = ""  # "" or "int8": weights per output channel, activations per token
    max_batch_size: int = 64  # sequences in one step
    max_num_tokens: int = 2048  # token budget of one step
    max_seq_len: int = 0  # prompt + output of one sequence; 0: the checkpoint's own limit
    tokens_per_block: int = 32  # KV block size
    target: str = "cpu"
