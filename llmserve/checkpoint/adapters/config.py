"""Reads adapter_config.json, as PEFT writes it for LoRA.

Source: peft 0.21, `LoraConfig`. A key that changes what the adapter computes is supported or refused by name. An
unknown key is refused unless its value is null, false or empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from llmserve.checkpoint.json_file import read_json_object
from llmserve.errors import CheckpointError
from llmserve.models.config import is_number

Number = TypeVar("Number", int, float)

CONFIG_NAME = "adapter_config.json"
HONOURED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "use_dora"})
IN_THE_TENSORS = frozenset(  # keys that select modules; the tensors' names show which
    {"target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "bias"}
)
OF_TRAINING = frozenset(
    {
        "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version",
        "lora_dropout", "megatron_config", "megatron_core", "eva_config", "runtime_config", "init_lora_weights",
        "ensure_weight_tying", "loftq_config", "qalora_group_size",
    }
)  # fmt: skip
PATTERN = re.compile(r"\^?[\w-]+(?:\\?\.\*?[\w-]*)*\$?")  # names with stars, limited so that matching is quick
MAX_STARS = 3
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # values that leave the base's weights unchanged


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """`alphas` and `ranks` replace `alpha` and `rank` for modules whose name ends with a pattern."""

    alpha: float
    rank: int
    is_rank_stabilized: bool
    is_dora: bool
    alphas: Mapping[str, float]
    ranks: Mapping[str, int]

    def rank_of(self, module: str) -> int:
        return _of(module, self.ranks, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of the product of both matrices."""
        rank = self.rank_of(module)
        return _of(module, self.alphas, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_lora_config(folder: Path, problems: list[str]) -> LoraConfig | None:
    """None if `problems` were added."""
    try:
        config = read_json_object(folder / CONFIG_NAME)
    except CheckpointError as error:
        problems.append(str(error))
        return None
    found = [*_unsupported(config)]
    alpha, rank = config.get("lora_alpha", 8), config.get("r", 8)
    alphas, ranks = (config.get(name) or {} for name in ("alpha_pattern", "rank_pattern"))
    for name, values in (("lora_alpha", {"": alpha}), ("alpha_pattern", alphas)):
        if not isinstance(values, dict) or not all(is_number(value) for value in values.values()):
            found.append(f"{CONFIG_NAME}: {name} must be a number, or one number per pattern")
    for name, values in (("r", {"": rank}), ("rank_pattern", ranks)):
        if not isinstance(values, dict) or not all(type(value) is int and value > 0 for value in values.values()):
            found.append(f"{CONFIG_NAME}: {name} must be an integer above 0, or one per pattern")
    found += [
        f"{CONFIG_NAME}: the pattern {pattern!r} is not supported: use module names with at most {MAX_STARS} `*`"
        for pattern in dict.fromkeys([*_keys(alphas), *_keys(ranks)])
        if not PATTERN.fullmatch(pattern) or pattern.count("*") > MAX_STARS
    ]
    problems += found
    if found:
        return None
    return LoraConfig(alpha, rank, bool(config.get("use_rslora")), bool(config.get("use_dora")), alphas, ranks)


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    found = []
    if (kind := config.get("peft_type")) != "LORA":
        found.append(f"{CONFIG_NAME}: peft_type is {kind!r}; supported: 'LORA'")
    if (start := config.get("init_lora_weights")) not in PLAIN_STARTS:
        found.append(
            f"{CONFIG_NAME}: init_lora_weights {start!r} changes the base's weights; save the adapter again with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    known = HONOURED | IN_THE_TENSORS | OF_TRAINING
    return found + [
        f"{CONFIG_NAME}: {name} is not supported (it is {value!r})"
        for name, value in config.items()
        if name not in known and value
    ]


def _keys(patterns: Any) -> list[str]:
    return list(patterns) if isinstance(patterns, dict) else []


def _of(module: str, patterns: Mapping[str, Number], default: Number) -> Number:
    """PEFT's rule: the first pattern that equals the name, or its end after a dot."""
    matching = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(matching, default)
