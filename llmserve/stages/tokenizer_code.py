"""The code files of a tokenizer that transformers runs itself (`auto_map` in tokenizer_config.json).

Here they are only data: they are found by reading them as text, copied into an engine directory, and never imported.
Python models of a repository that call `AutoTokenizer.from_pretrained(tokenizer_dir, trust_remote_code=True)` need
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError
from llmserve.stages.files import read_json

MAX_FILES = 16
MAX_BYTES = 2**20  # of all files together; published ones have some tens of kilobytes
MODULE_NAME = re.compile(r"[A-Za-z0-9_-]+")
RELATIVE_IMPORT = re.compile(rb"^[ \t]*from[ \t]+(\.[\w.]*)[ \t]+import\b", re.MULTILINE)
ANOTHER_REPOSITORY = "--"  # transformers writes `owner/name--module.Class`


@dataclass(frozen=True, slots=True)
class TokenizerCode:
    files: tuple[str, ...] = ()  # names of files in the folder
    problems: tuple[str, ...] = ()  # why a named file is missing


def find_tokenizer_code(folder: Path) -> TokenizerCode:
    """The files that `auto_map` names, and their imports from the same folder, as far as they exist."""
    try:
        waiting = _named_modules(read_json(folder / "tokenizer_config.json"))
    except CheckpointError as error:
        return TokenizerCode(problems=(str(error),))
    files: dict[str, None] = {}
    problems: list[str] = []
    num_bytes = 0
    while waiting:
        module = waiting.pop(0)
        name = f"{module}.py"
        if name in files:
            continue
        content, problem = _read(folder, module, MAX_BYTES - num_bytes)
        if not problem and len(files) == MAX_FILES:
            problem = f"{name} exceeds the maximum of {MAX_FILES} files"
        if problem:
            problems.append(problem)
            continue
        files[name] = None
        num_bytes += len(content)
        waiting += [found.decode().removeprefix(".") for found in RELATIVE_IMPORT.findall(content)]
    return TokenizerCode(tuple(files), tuple(dict.fromkeys(problems)))


def missing_tokenizer_code(folder: Path) -> tuple[str, ...]:
    """Files that `auto_map` names but that are not in the folder."""
    try:
        modules = _named_modules(read_json(folder / "tokenizer_config.json"))
    except CheckpointError:
        return ()
    return tuple(f"{module}.py" for module in modules if not (folder / f"{module}.py").is_file())


def _named_modules(tokenizer_config: Mapping[str, Any]) -> list[str]:
    """Modules of AutoTokenizer's classes: `module.Class`, alone or as [slow, fast]; older files only have that list."""
    auto_map = tokenizer_config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
    classes = named if isinstance(named, list) else [named]
    modules = (one.rpartition(".")[0] for one in classes if isinstance(one, str))
    return list(dict.fromkeys(modules))


def _read(folder: Path, module: str, room: int) -> tuple[bytes, str]:
    """The module's file, or why it cannot be copied."""
    name = f"{module}.py"
    if ANOTHER_REPOSITORY in module:
        return b"", f"{module} is code of another repository"
    if not MODULE_NAME.fullmatch(module):
        return b"", f"{module!r} is not the name of a file in the folder of the tokenizer"
    if not (folder / name).is_file():
        return b"", f"{name} is missing"
    try:
        with (folder / name).open("rb") as file:
            content = file.read(room + 1)
    except OSError as error:
        return b"", f"{name} cannot be read: {error.strerror}"
    if len(content) > room:
        return b"", f"{name} exceeds the maximum of {MAX_BYTES} bytes of code"
    return content, ""
