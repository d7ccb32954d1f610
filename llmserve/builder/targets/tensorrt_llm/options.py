"""Build options for TensorRT-LLM. Names and values are those of its trtllm-build.

Old scripts use them for every build. So other targets only report options that tune TensorRT-LLM's kernels, and refuse
those that would change the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmserve.builder.flag import Elsewhere, Flag, option
from llmserve.builder.targets.options import TargetOptions
from llmserve.models.number_formats import FLOATS, QUANTIZED

PLUGIN_TYPES = ("auto", *FLOATS, "disable")
SWITCH = ("enable", "disable")
WEIGHT_ONLY_PRECISIONS = tuple(name for name, format in QUANTIZED.items() if format.weight_only_algo)


def _tuning(help: str, choices: tuple[str, ...] = ()) -> Flag:
    return Flag(help, choices, elsewhere=Elsewhere.WITHOUT_EFFECT)


def _building(help: str, least: int | None = None) -> Flag:
    return Flag(help, least=least, elsewhere=Elsewhere.WITHOUT_EFFECT, leaves_a_trace=False)


@dataclass(frozen=True, slots=True)
class TensorrtLlmOptions(TargetOptions):
    """A value of 0 means not given."""

    tp_size: int = option(1, Flag("GPUs that share each layer", least=1))
    pp_size: int = option(1, Flag("GPUs that share the layers among them", least=1))
    max_input_len: int = option(
        0, Flag("Longest prompt; 0: max_seq_len less 1", least=0, elsewhere=Elsewhere.WITHOUT_EFFECT)
    )
    max_beam_width: int = option(1, Flag("Beams of one request", least=1))
    gemm_plugin: str = option("auto", _tuning("Matrix products", PLUGIN_TYPES))  # auto: the engine's dtype
    gpt_attention_plugin: str = option("auto", _tuning("Attention", PLUGIN_TYPES))
    context_fmha: str = option("enable", _tuning("Fused attention over prompts", SWITCH))
    remove_input_padding: str = option("enable", Flag("Packed prompts", SWITCH))
    kv_cache_type: str = option("paged", Flag("KV cache", ("paged", "continuous", "disabled")))
    use_weight_only: bool = option(False, Flag("Quantize weights only.", elsewhere=Elsewhere.ANOTHER_NAME))
    weight_only_precision: str = option(
        "int8", Flag("Of those weights", WEIGHT_ONLY_PRECISIONS, elsewhere=Elsewhere.ANOTHER_NAME)
    )
    workers: int = option(1, _building("Ranks that are built at the same time", least=1))
    parallel_build: bool = option(False, _building("As many workers as GPUs."))
    multiple_profiles: str = option("disable", _tuning("Several optimization profiles", SWITCH))
    reduce_fusion: str = option("disable", _tuning("Sum and norm in one kernel", SWITCH))

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def in_other_words(self) -> Mapping[str, Any]:
        """`use_weight_only` corresponds to `quantization`."""
        is_said = self.use_weight_only and self.weight_only_precision in WEIGHT_ONLY_PRECISIONS
        return {"quantization": self.weight_only_precision} if is_said else {}

    def words_of_the_name(self) -> tuple[str, ...]:
        return ("tensorrt_llm", *([f"tp{self.tp_size}"] if self.tp_size > 1 else ()))


DEFAULTS = TensorrtLlmOptions()
