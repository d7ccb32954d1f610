"""Features of a network that this target can express for TensorRT-LLM; all others are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from llmserve.builder.targets.base import unknown_ops
from llmserve.models.graph import Op, OpKind, Program
from llmserve.models.spec import DecoderSpec, Param

ARCHITECTURES = (
    "BaichuanForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
)  # fmt: skip
QWEN_TYPES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
OPS: Mapping[OpKind, Collection[str]] = {  # with attributes; others, and other values than below, cannot be expressed
    OpKind.EMBED: (),
    OpKind.RMS_NORM: ("eps", "groups"),
    OpKind.LINEAR: (),
    OpKind.SLICE: ("start",),
    OpKind.ROPE: ("head_dim", "inv_freq", "scale"),
    OpKind.ATTENTION: ("layer", "num_heads", "num_kv_heads", "head_dim", "scale", "window", "alibi_slopes"),
    OpKind.GATED_ACTIVATION: ("activation",),
    OpKind.ADD: (),
    OpKind.SELECT_ROWS: (),
    OpKind.LOGITS: (),
}


def network_problems(spec: DecoderSpec, program: Program, params: Sequence[Param]) -> list[str]:
    """Why no checkpoint that this target writes can express this network."""
    found = []
    if spec.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        found.append(f"architecture {spec.architecture} cannot be written for TensorRT-LLM; it supports {known}")
    found += unknown_ops(program, OPS)
    found += dict.fromkeys(text for op in program.ops if (text := _value_problem(op)))
    if spec.architecture in QWEN_TYPES and any(param.name.endswith("attn.output.bias") for param in params):
        found.append("its Qwen3 has no attention_bias; this checkpoint has one")
    return [f"TensorRT-LLM does not support this network: {text}" for text in found]


def _value_problem(op: Op) -> str:
    """The problem with a value of a known attribute, or an empty string."""
    if op.kind is OpKind.GATED_ACTIVATION and op.attrs["activation"] != "silu":
        return f"activation {op.attrs['activation']!r} of {op.kind.value}, only 'silu' is supported"
    if op.kind is OpKind.ATTENTION and op.attrs["scale"] != op.number("head_dim") ** -0.5:
        return f"scale {op.attrs['scale']} of {op.kind.value}, only one over the root of the head size is supported"
    if op.kind is OpKind.ROPE:
        inv_freq = op.attrs["inv_freq"]
        assert isinstance(inv_freq, tuple)
        if 2 * len(inv_freq) != op.attrs["head_dim"]:
            return f"{op.kind.value} of {2 * len(inv_freq)} in {op.attrs['head_dim']} elements, only whole heads can be"
    return ""
