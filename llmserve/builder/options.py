"""What the user asked a build for, resolved and frozen. Names follow trtllm-build where a name exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from llmserve.builder.targets.tensorrt_llm.options import WEIGHT_ONLY_PRECISIONS, TensorrtLlmOptions
from llmserve.errors import RecipeError

DTYPES = ("float16", "bfloat16", "float32")
QUANTIZATIONS = ("", "int8", "int4")
KV_CACHE_DTYPES = ("auto", "int8")
INT4_GROUP_SIZES = (32, 64, 128)
DEFAULT_INT4_GROUP_SIZE = 64
TENSORRT_LLM = "tensorrt_llm"
HOW_IT_IS_BUILT = ("workers", "parallel_build")  # options that leave no trace in the engine


@dataclass(frozen=True, slots=True)
class BuildOptions:
    dtype: str = "float16"
    quantization: str = ""  # "", "int8" or "int4": of weights; activations become int8 with either
    group_size: int = 0  # inputs that share a scale, with int4 only; 0: the default
    kv_cache_dtype: str = "auto"  # "auto": as `dtype`; "int8": with a scale per token and head
    max_batch_size: int = 64  # sequences in one step
    max_num_tokens: int = 2048  # token budget of one step
    max_seq_len: int = 0  # prompt + output of one sequence; 0: the checkpoint's own limit
    tokens_per_block: int = 32  # KV block size
    target: str = "cpu"
    tensorrt_llm: TensorrtLlmOptions = field(default_factory=TensorrtLlmOptions)

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> BuildOptions:
        """From names and values without nesting, as flags and recipes have them. `use_weight_only` says `quantization`.

        `RecipeError` when the two say different things.
        """
        other = {each.name for each in fields(TensorrtLlmOptions)}
        library = TensorrtLlmOptions(**{name: value for name, value in values.items() if name in other})
        own = {name: value for name, value in values.items() if name not in other}
        options = cls(**own, tensorrt_llm=library)
        if not library.use_weight_only or library.weight_only_precision not in WEIGHT_ONLY_PRECISIONS:
            return options
        if options.quantization not in ("", library.weight_only_precision):
            raise RecipeError(
                f"quantization {options.quantization} and weight_only_precision {library.weight_only_precision} "
                "differ; give one of them"
            )
        return replace(options, quantization=library.weight_only_precision)

    def as_dict(self) -> dict[str, Any]:
        """What decides what the engine is: without the options of another target's library, or how many build it."""
        values = asdict(self)
        library = values.pop("tensorrt_llm")
        if self.target != TENSORRT_LLM:
            return values
        return values | {"tensorrt_llm": {name: library[name] for name in library if name not in HOW_IT_IS_BUILT}}

    @property
    def int4_group_size(self) -> int:
        return self.group_size or DEFAULT_INT4_GROUP_SIZE

    @property
    def cache_dtype(self) -> str:
        """What keys and values are kept in."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def rounds_what_it_computes(self) -> bool:
        """Whether activations, or keys and values, become integers."""
        return bool(self.quantization) or self.kv_cache_dtype == "int8"

    def problems(self) -> list[str]:
        """Everything that is wrong with these values, in words; empty when they are valid."""
        quantizations = ", ".join(name for name in QUANTIZATIONS if name)
        block = self.tokens_per_block
        rules = [
            (self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}"),
            (
                self.quantization in QUANTIZATIONS,
                f"quantization must be one of {quantizations}, or left out, got {self.quantization!r}",
            ),
            (
                self.group_size in ((0, *INT4_GROUP_SIZES) if self.quantization == "int4" else (0,)),
                f"group_size must be one of {', '.join(map(str, INT4_GROUP_SIZES))} and needs quantization int4, "
                f"got {self.group_size} with {self.quantization or 'no quantization'}",
            ),
            (
                self.kv_cache_dtype in KV_CACHE_DTYPES,
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}",
            ),
            (self.max_batch_size >= 1, f"max_batch_size must be at least 1, got {self.max_batch_size}"),
            (self.max_num_tokens >= 1, f"max_num_tokens must be at least 1, got {self.max_num_tokens}"),
            (
                self.max_seq_len == 0 or self.max_seq_len >= 2,
                f"max_seq_len must be at least 2 (or 0: the checkpoint's limit), got {self.max_seq_len}",
            ),
            (block >= 1 and block & (block - 1) == 0, f"tokens_per_block must be a power of two, got {block}"),
        ]
        return [text for holds, text in rules if not holds] + self.tensorrt_llm.problems()
