"""The parameters of a PyTorch model's config, under Triton's names."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import ModelConfigError, raise_problems

NO_EFFECT = (
    "DISABLE_CUDNN", "ENABLE_CACHE_CLEANING", "ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_NVFUSER",
    "ENABLE_TENSOR_FUSER",
)  # fmt: skip

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchParameters:
    inference_mode: bool = True
    optimized_execution: bool = True
    shares_weights: bool = False  # one module for all instances on a device
    intra_op_threads: int = 0  # 0: torch's default, every core
    inter_op_threads: int = 0

    @staticmethod
    def read(config: ModelConfig) -> TorchParameters:
        values = {key: value.string_value for key, value in config.parameters.items()}
        problems: list[str] = []

        def flag(key: str, default: bool) -> bool:
            text = values.get(key, str(default)).lower()
            if text not in ("true", "false", "1", "0"):
                problems.append(f"parameter {key} must be true or false, got '{text}'")
            return text in ("true", "1")

        def number(key: str) -> int:
            text = values.get(key, "0")
            if not text.isdecimal():
                problems.append(f"parameter {key} must be an integer, got '{text}'")
                return 0
            return int(text)

        read = TorchParameters(
            inference_mode=flag("INFERENCE_MODE", True),
            optimized_execution=not flag("DISABLE_OPTIMIZED_EXECUTION", False),
            shares_weights=flag("ENABLE_WEIGHT_SHARING", False),
            intra_op_threads=number("INTRA_OP_THREAD_COUNT"),
            inter_op_threads=number("INTER_OP_THREAD_COUNT"),
        )
        raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", problems)
        if ignored := sorted(set(NO_EFFECT).intersection(values)):
            logger.warning("model '%s': these parameters have no effect: %s", config.name, ", ".join(ignored))
        return read
