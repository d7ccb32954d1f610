"""Finds the quantization format that a folder's configs name, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.checkpoint.formats.auto_round import OLD_METHOD, auto_round
from llmserve.checkpoint.formats.awq import awq
from llmserve.checkpoint.formats.base import Format
from llmserve.checkpoint.formats.compressed_tensors import compressed_tensors
from llmserve.checkpoint.formats.fp8 import fbgemm, fp8, modelopt
from llmserve.checkpoint.formats.gptq import gptq
from llmserve.checkpoint.formats.mxfp4 import mxfp4
from llmserve.checkpoint.json_file import read_json_object
from llmserve.errors import CheckpointError, Unsupported
from llmserve.models.config import ConfigReader

CONFIG_KEYS = ("quantization_config", "compression_config")  # in config.json; the second: early compressed-tensors
# other files, with the method to assume if they name none
FILES: Mapping[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
SYNONYMS = {"w_bit": "bits", "q_group_size": "group_size"}
COMPARED = ("quant_method", "bits", "group_size", "sym", "desc_act", "zero_point", "quant_algo")

METHODS: Mapping[str, Callable[[ConfigReader], Format]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    OLD_METHOD: auto_round,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
}
ORIGINAL = "use the original checkpoint, and quantize at build time: --quantization int8 or int4"
INSTEAD: Mapping[str, str] = {
    "bitsandbytes": f"bitsandbytes quantizes a model when it is loaded, so the original loses nothing: {ORIGINAL}",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    format: Format
    source: str  # key of config.json, or name of the file
    files: tuple[str, ...]  # files besides config.json that describe it


def read_quantization(folder: Path, config: Mapping[str, Any], problems: list[str]) -> Quantization | None:
    """None if the checkpoint is not quantized, or if problems were added to `problems`.

    Raises `Unsupported` for an unknown method.
    """
    found = _descriptions(folder, config, problems)
    if not found:
        return None
    (source, description), *others = found.items()
    for other, said in others:
        problems += [
            f"{source} and {other} differ: {key} is {description[key]!r} in the first, but {said[key]!r} in the second"
            for key in COMPARED
            if key in description and key in said and description[key] != said[key]
        ]
    method = description.get("quant_method")
    if method is None and ("load_in_4bit" in description or "load_in_8bit" in description):
        method = "bitsandbytes"
    if not isinstance(method, str):
        problems.append(f"quant_method in {source} must be a name, got {method!r}")
        return None
    if (make := METHODS.get(method.lower())) is None:
        raise Unsupported(
            f"checkpoint {folder} is quantized by {method} ({source}), which is not supported; supported: "
            f"{', '.join(METHODS)}. {INSTEAD.get(method.lower(), ORIGINAL)}"
        )
    reader = ConfigReader(description)
    made = make(reader)
    problems += [f"{source}: {problem}" for problem in reader.problems]
    return Quantization(made, source, tuple(name for name in FILES if name in found))


def _descriptions(folder: Path, config: Mapping[str, Any], problems: list[str]) -> dict[str, dict[str, Any]]:
    """The description in each source, config.json's first."""
    found: dict[str, dict[str, Any]] = {}
    for key in CONFIG_KEYS:
        if isinstance(value := config.get(key), dict):
            found[key] = _with_one_name(value)
        elif value is not None:
            problems.append(f"{key} must be an object, got {value!r}")
    for name, method in FILES.items():
        if not (folder / name).is_file():
            continue
        try:
            content = read_json_object(folder / name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if isinstance(inner := content.get("quantization"), dict):  # ModelOpt's
            content = inner
        found[name] = {"quant_method": method, **_with_one_name(content)}
    return found


def _with_one_name(description: Mapping[str, Any]) -> dict[str, Any]:
    return {SYNONYMS.get(key, key): said for key, said in description.items()}
