"""Functions and classes of Python sources, with their docstrings; nothing is imported or executed."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

SKIPPED = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "__pycache__", "turtledemo", "idlelib"})
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Definition:
    module: str
    name: str  # with its class in front, if it has one
    parameters: tuple[str, ...]  # names; empty for a class
    signature: str  # as in the source, without `def` or `class`
    docstring: str


def definitions(library: Path) -> Iterator[Definition]:
    """Definitions in all public modules below `library`, in order, including those without docstrings."""
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        parts = (*relative.parts[:-1], relative.stem)
        if not SKIPPED.intersection(parts) and not any(part.startswith("_") for part in parts):
            yield from _in_source(".".join(parts), path.read_text(encoding="utf-8", errors="replace"))


def _in_source(module: str, source: str) -> Iterator[Definition]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other sources' strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield _function(module, node, "")
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield Definition(module, node.name, (), node.name, ast.get_docstring(node) or "")
            methods = (child for child in node.body if isinstance(child, Function))
            yield from (_function(module, m, f"{node.name}.") for m in methods if not m.name.startswith("_"))


def _function(module: str, node: Function, prefix: str) -> Definition:
    given = node.args
    plain = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    starred = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    bare = ast.arguments(
        posonlyargs=[ast.arg(each.arg) for each in given.posonlyargs],
        args=[ast.arg(each.arg) for each in given.args],
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwonlyargs=[ast.arg(each.arg) for each in given.kwonlyargs],
        kw_defaults=given.kw_defaults,
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=given.defaults,
    )
    signature = f"{prefix}{node.name}({ast.unparse(bare)})"
    return Definition(module, f"{prefix}{node.name}", (*plain, *starred), signature, ast.get_docstring(node) or "")
