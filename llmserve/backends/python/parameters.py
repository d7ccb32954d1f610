"""The parameters of a Python model's config."""

from __future__ import annotations

from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.python.instance import NO_LIMITS, Limits
from llmserve.errors import ModelConfigError, raise_problems

MODES = ("thread", "process")
ABANDONED_TIMEOUT_S = 30.0  # how long a batch may run without a waiting client


@dataclass(frozen=True, slots=True)
class PythonParameters:
    in_process: bool = False  # each instance in its own process
    limits: Limits = NO_LIMITS
    environment: str = ""  # path of the model's own Python environment

    @staticmethod
    def read(config: ModelConfig) -> PythonParameters:
        values = {key: value.string_value for key, value in config.parameters.items()}
        environment = values.get("EXECUTION_ENV_PATH", "")
        mode = values.get("EXECUTION_MODE", "process" if environment else "thread").lower()
        timeout = values.get("EXECUTION_TIMEOUT_SECS", "")
        problems = []
        if environment and mode == "thread":
            problems.append("parameter EXECUTION_ENV_PATH requires EXECUTION_MODE process")
        if mode not in MODES:
            problems.append(f"parameter EXECUTION_MODE must be one of {', '.join(MODES)}, got '{mode}'")
        if timeout and mode != "process":
            problems.append(
                "parameter EXECUTION_TIMEOUT_SECS requires EXECUTION_MODE process: a thread cannot be ended"
            )
        execution_s = _seconds(timeout)
        if timeout and execution_s <= 0:
            problems.append(f"parameter EXECUTION_TIMEOUT_SECS must be a number above 0, got '{timeout}'")
        raise_problems(ModelConfigError, f"model '{config.name}' cannot be loaded", problems)
        if mode == "thread":
            return PythonParameters()
        return PythonParameters(True, Limits(execution_s, ABANDONED_TIMEOUT_S), environment)


def _seconds(text: str) -> float:
    """0 if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return 0.0
