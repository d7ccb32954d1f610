"""Imports a `model.py` for one instance, separate from all other models.

Files in its folder and in the model's directory can be imported by their plain names, at any time and from any thread
of the model. Files in its folder also support relative imports, because the folder is a package, as in Triton. They
also belong to this instance only, so an instance's files have their own `import`, which does not use the process's
sys.modules. In a process with only this model, libraries such as pickle find them, too.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from llmserve.backends.python.current_utils import make_current
from llmserve.backends.python.errors import describe_failure
from llmserve.backends.python.utils_module import MODULE_NAMES
from llmserve.errors import ModelConfigError

_IMPORTING = threading.RLock()  # sys.modules and sys.meta_path belong to the process: one model at a time


def import_model(path: Path, module_name: str, utils: ModuleType, *, is_alone: bool = False) -> type[Any]:
    """The class `TritonPythonModel` in a file. `utils` is its triton_python_backend_utils.

    `is_alone`: the process has no other model. Call it in the thread that will run the model.
    """
    if not path.is_file():
        raise ModelConfigError(f"{path} does not exist")
    path = Path(os.path.abspath(path))  # as in modules; a repository may be given by a relative path
    imports = ModelImports((str(path.parent), str(path.parent.parent)), utils, is_alone=is_alone)
    loader = _OwnLoader(module_name, str(path), imports)
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    make_current(utils)
    sys.modules[module_name] = module
    try:
        with imports.active():
            loader.exec_module(module)
    except BaseException as error:  # border: sys.exit() is the model's load error, too, and must not end the server
        forget_model(module_name)
        raise ModelConfigError(f"{path} cannot be imported: {describe_failure(error)}") from error
    model_class = getattr(module, "TritonPythonModel", None)
    if not isinstance(model_class, type) or not callable(getattr(model_class, "execute", None)):
        forget_model(module_name)
        raise ModelConfigError(f"{path} has no class TritonPythonModel with a method execute")
    return model_class


def forget_model(module_name: str) -> None:
    sys.modules.pop(module_name, None)


class ModelImports:
    """The `import` of one instance's files. It is also a finder while it is active; if the model is alone, it is always
    the last finder."""

    def __init__(self, directories: Sequence[str], utils: ModuleType, *, is_alone: bool = False) -> None:
        self.builtins = {**vars(builtins), "__import__": self._import}
        self._directories = list(directories)
        self._utils = utils
        self._package = ModuleType(Path(directories[0]).name)  # the package that relative imports of model.py refer to
        self._package.__path__ = self._directories[:1]
        self._neighbours = {self._package.__name__: self._package}  # imported; out of sys.modules between imports
        self._thread = 0  # the thread that is importing
        self._is_alone = is_alone
        if is_alone:
            sys.meta_path.append(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, this thread can import the files of the directory."""
        with _IMPORTING:
            if self is sys.meta_path[0]:  # a nested import
                yield
                return
            before = set(sys.modules)
            sys.modules.update({name: module for name, module in self._neighbours.items() if name not in before})
            sys.meta_path.insert(0, self)
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                sys.meta_path.remove(self)
                if not self._is_alone:
                    self._take_neighbours(set(sys.modules) - before)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if threading.get_ident() != self._thread and not self._is_alone:
            return None
        spec = PathFinder.find_spec(fullname, self._places() if path is None else path, target)
        if spec is None or not self._is_own(spec):
            return None
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _OwnLoader(fullname, spec.loader.path, self)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`__import__` of these files; only modules in their folders are special."""
        if level == 0 and name in MODULE_NAMES:
            return self._utils
        if level and not (globals or {}).get("__package__"):
            globals = {"__package__": self._package.__name__}
        top_name = name.partition(".")[0]
        if level == 0 and PathFinder.find_spec(top_name, self._places()) is None:
            return __import__(name, globals, locals, fromlist or (), level)
        with self.active():
            return __import__(name, globals, locals, fromlist or (), level)

    def _take_neighbours(self, names: set[str]) -> None:
        """Remove the modules from sys.modules, because another model may have files of the same names."""
        for name in names:
            module = sys.modules[name]
            known = getattr(module, "__dict__", {})  # do not ask the module itself: it may have every attribute
            places = [known.get("__file__") or "", *(known.get("__path__") or ())]
            if name in self._neighbours or any(map(self._holds, places)):
                self._neighbours[name] = sys.modules.pop(name)

    def _places(self) -> list[str]:
        """Folders with its files, including folders within the model's that it added to sys.path."""
        return [*self._directories, *filter(self._adds, sys.path)]

    def _adds(self, folder: str) -> bool:
        """Another version of the model may have added its own folder there."""
        if not self._holds(folder):
            return False
        first = os.path.relpath(folder, self._directories[1]).partition(os.sep)[0]
        return not first.isdigit() or first == self._package.__name__

    def _is_own(self, spec: ModuleSpec) -> bool:
        """A folder without __init__.py is a package, too, unless a regular package has that name elsewhere."""
        if spec.loader is not None:
            return self._holds(spec.origin or "")
        places = list(spec.submodule_search_locations or ())
        spec.submodule_search_locations = places  # otherwise sys.path is searched again
        return any(map(self._holds, places)) and ("." in spec.name or PathFinder.find_spec(spec.name) is None)

    def _holds(self, file: str) -> bool:
        return any(file.startswith(directory + os.sep) for directory in self._directories)


class _OwnLoader(SourceFileLoader):
    """Gives a file its instance's import, and compiles it each time.

    Cached bytecode is only checked by a file's size and its time in seconds: a model that is changed and immediately
    reloaded could get its old code. Also, nothing is written to a repository.
    """

    def __init__(self, name: str, path: str, imports: ModelImports) -> None:
        super().__init__(name, path)
        self._imports = imports

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._imports.builtins
        super().exec_module(module)
