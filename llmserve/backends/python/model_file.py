"""Imports a `model.py` for one instance, apart from every other model.

Files beside it can be imported by their plain names while it is being imported; they too belong to this instance alone.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from llmserve.backends.python.errors import describe_failure
from llmserve.backends.python.utils_module import MODULE_NAME
from llmserve.errors import ModelConfigError

_IMPORTING = threading.Lock()  # sys.path and sys.modules belong to the process: one model at a time


def import_model(path: Path, module_name: str, utils: ModuleType) -> type[Any]:
    """The class `TritonPythonModel` of a file. `utils` is what it finds as triton_python_backend_utils."""
    if not path.is_file():
        raise ModelConfigError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    directory = str(path.parent)
    with _IMPORTING:
        before = set(sys.modules)
        sys.modules[MODULE_NAME] = utils
        sys.modules[module_name] = module
        sys.path.insert(0, directory)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            forget_model(module_name)
            raise ModelConfigError(f"{path} cannot be imported: {describe_failure(error)}") from error
        finally:
            sys.path.remove(directory)
            _forget_neighbours(set(sys.modules) - before - {module_name}, directory)
    model_class = getattr(module, "TritonPythonModel", None)
    if not isinstance(model_class, type) or not callable(getattr(model_class, "execute", None)):
        forget_model(module_name)
        raise ModelConfigError(f"{path} has no class TritonPythonModel with a method execute")
    return model_class


def forget_model(module_name: str) -> None:
    sys.modules.pop(module_name, None)


def _forget_neighbours(names: set[str], directory: str) -> None:
    """Another model may have a file of the same name."""
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and file.startswith(directory):
            del sys.modules[name]
