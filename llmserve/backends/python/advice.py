"""Advice on errors of models that do not load, where the error shows the cause."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from pathlib import Path

from llmserve.stages.tokenizer_code import find_tokenizer_code, missing_tokenizer_code

EXTRA_OF_PACKAGE = {"transformers": "transformers", "torch": "pytorch", "onnxruntime": "onnx"}  # what models import


def general_advice(error: BaseException) -> str:
    """The extra that installs a missing package, or the setting that gives the model a main thread; else empty."""
    if isinstance(error, ValueError) and "only works in main thread" in str(error):
        return "; set the parameter EXECUTION_MODE to process; by default, a model runs in another thread of the server"
    if (own := _own_module_not_found(error)) is not None:
        return f"; libraries find the model's own module {own} if the parameter EXECUTION_MODE is process"
    extra = EXTRA_OF_PACKAGE.get(error.name or "") if isinstance(error, ModuleNotFoundError) else None
    return f"; it comes with: pip install 'llmserve[{extra}]'" if extra else ""


def _own_module_not_found(error: BaseException) -> str | None:
    """The model's own module that a library did not find, although it is next to a file in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if isinstance(error, KeyError) and frames and "load" in (frames[-1].line or ""):  # pickle's error
        name = str(error.args[0]) if error.args else None
    if name is None or not name.isidentifier():
        return None
    return name if any((Path(frame.filename).parent / f"{name}.py").exists() for frame in frames) else None


def tokenizer_advice(error: BaseException, arguments: Mapping[str, str]) -> str:
    """For a model whose `tokenizer_dir` has a tokenizer with its own code: what is missing or fails.

    Empty for other errors. `arguments` are those of `initialize`.
    """
    parameters = json.loads(arguments["model_config"]).get("parameters", {})
    given = parameters.get("tokenizer_dir", {}).get("string_value")
    if not given:
        return ""
    folder, setting = Path(given), f"--parameter {arguments['model_name']}.tokenizer_dir=DIR"
    missing = [name for name in missing_tokenizer_code(folder) if name in str(error)]
    if missing:
        return (
            f"; this tokenizer has its own code (auto_map in tokenizer_config.json), and {folder} has no "
            f"{', '.join(missing)}: rebuild the engine from a checkpoint that has it, or set a folder that has: "
            f"{setting}"
        )
    passed = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
    if failed := passed.intersection(find_tokenizer_code(folder).files):
        return (
            f"; this tokenizer has its own code ({', '.join(sorted(failed))}), which fails with the installed "
            "transformers: install a release that it was written for, or correct it in the checkpoint and rebuild the"
            f" engine, or set a folder whose tokenizer loads: {setting}"
        )
    return ""
