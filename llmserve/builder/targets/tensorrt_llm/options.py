"""Options of a build that mean something to TensorRT-LLM. Names and values are those of its trtllm-build.

The cpu target takes them too, so that old scripts run: what it does anyway is fine, what tunes another library's
kernels is reported, and what would give another engine is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

PLUGIN_TYPES = ("auto", "float16", "bfloat16", "float32", "disable")
SWITCH = ("enable", "disable")
WEIGHT_ONLY_PRECISIONS = ("int8", "int4")
CHOICES = {
    "gemm_plugin": PLUGIN_TYPES,
    "gpt_attention_plugin": PLUGIN_TYPES,
    "context_fmha": SWITCH,
    "remove_input_padding": SWITCH,
    "kv_cache_type": ("paged", "continuous", "disabled"),
    "weight_only_precision": WEIGHT_ONLY_PRECISIONS,
    "multiple_profiles": SWITCH,
    "reduce_fusion": SWITCH,
}
REFUSED_ON_CPU = ("tp_size", "pp_size", "max_beam_width", "remove_input_padding", "kv_cache_type")


@dataclass(frozen=True, slots=True)
class TensorrtLlmOptions:
    """0 or an empty string: not given."""

    tp_size: int = 1  # GPUs that share each layer
    pp_size: int = 1  # GPUs that share the layers among them
    max_input_len: int = 0  # prompt of one sequence; 0: max_seq_len less one
    max_beam_width: int = 1
    gemm_plugin: str = "auto"  # auto: the engine's dtype
    gpt_attention_plugin: str = "auto"
    context_fmha: str = "enable"
    remove_input_padding: str = "enable"
    kv_cache_type: str = "paged"
    use_weight_only: bool = False
    weight_only_precision: str = "int8"
    workers: int = 1  # ranks that are built at once
    parallel_build: bool = False  # as many workers as GPUs
    multiple_profiles: str = "disable"
    reduce_fusion: str = "disable"

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def problems(self) -> list[str]:
        """Everything that is wrong with these values, for whatever target."""
        found = [
            f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
            for name, allowed in CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        found += [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in ("tp_size", "pp_size", "max_beam_width", "workers")
            if getattr(self, name) < 1
        ]
        if self.max_input_len < 0:
            found.append(f"max_input_len must not be negative, got {self.max_input_len}")
        return found

    def cpu_problems(self) -> list[str]:
        """What the cpu target would have to ignore although it changes what the engine is."""
        return [
            f"{name} {getattr(self, name)} is for the tensorrt_llm target; leave it out, or build with "
            "--target tensorrt_llm on a machine with an NVIDIA GPU"
            for name in REFUSED_ON_CPU
            if getattr(self, name) != getattr(DEFAULTS, name)
        ]

    def cpu_notes(self) -> list[str]:
        """What was given and tunes nothing on the cpu target."""
        told = (*REFUSED_ON_CPU, "use_weight_only", "weight_only_precision")
        notes = [
            f"{field.name} {getattr(self, field.name)} has no effect on the cpu target"
            for field in fields(self)
            if field.name not in told and getattr(self, field.name) != getattr(DEFAULTS, field.name)
        ]
        if self.use_weight_only:
            notes.append(
                f"use_weight_only: the cpu target's {self.weight_only_precision} rounds activations to int8 too"
            )
        return notes


DEFAULTS = TensorrtLlmOptions()
