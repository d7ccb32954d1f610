"""The `triton_python_backend_utils` in sys.modules, for code that belongs to no model, such as installed packages.

The files of a model get the module of their instance directly. Anything else that imports the name gets one module for
the whole process, which looks up the instance whose thread (or asyncio task) is asking.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from llmserve.backends.python.bls import NoServer
from llmserve.backends.python.utils_module import MODULE_NAME, MODULE_NAMES, make_utils_module

_CURRENT: ContextVar[ModuleType] = ContextVar("current_utils")


class CurrentUtils(ModuleType):
    def __init__(self) -> None:
        super().__init__(MODULE_NAME, "The module that a TritonPythonModel imports.")
        self._of_no_model = make_utils_module("model", NoServer())  # in threads that a model started itself

    def __getattr__(self, name: str) -> Any:
        return getattr(_CURRENT.get(self._of_no_model), name)


def make_current(utils: ModuleType) -> None:
    """From now on, this thread belongs to the instance of `utils`."""
    _CURRENT.set(utils)
    current = CurrentUtils()
    for name in MODULE_NAMES:
        sys.modules.setdefault(name, current)
