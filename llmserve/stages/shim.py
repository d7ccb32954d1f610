"""How a `model.py` of the pipelines reads Triton's `initialize` arguments, and names errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmserve.errors import Code, LlmserveError
from llmserve.stages.files import resolve_path

TRITON_CODES = {
    Code.INVALID_ARGUMENT: "INVALID_ARG",
    Code.NOT_FOUND: "NOT_FOUND",
    Code.UNIMPLEMENTED: "UNSUPPORTED",
    Code.UNAVAILABLE: "UNAVAILABLE",
}


def path_parameter(args: Mapping[str, str], key: str) -> Path:
    """A path from the parameters of the model's config; see `resolve_path` for what it is relative to."""
    return resolve_path(_parameter(args, key, ""), Path(args["model_repository"]))


def flag_parameter(args: Mapping[str, str], key: str, default: bool) -> bool:
    return _parameter(args, key, str(default)).strip().lower() in ("true", "1", "t", "y", "yes")


def text_parameter(args: Mapping[str, str], key: str, default: str) -> str:
    return _parameter(args, key, default).strip()


def triton_error(utils: Any, error: LlmserveError) -> Any:
    """The error of a model. llmserve's server returns `error` itself; Triton keeps its code and text."""
    made = utils.TritonError(str(error), getattr(utils.TritonError, triton_code(error)))
    if hasattr(made, "cause"):
        made.cause = error.with_traceback(None)  # whose frames hold the request
    return made


def triton_code(error: LlmserveError) -> str:
    """The attribute of `pb_utils.TritonError` for an llmserve error."""
    return TRITON_CODES.get(error.code, "INTERNAL")


def _parameter(args: Mapping[str, str], key: str, default: str) -> str:
    parameters = json.loads(args["model_config"]).get("parameters", {})
    return str(parameters[key]["string_value"]) if key in parameters else default
