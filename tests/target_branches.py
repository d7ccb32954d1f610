"""Finds code that asks which target it is: the law that only a target's own rooms and the two registries may."""

from __future__ import annotations

import ast
import collections.abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

REGISTRIES = ("builder/targets/registry.py", "engine/registry.py")
NOT_A_TARGET = {"ENGINE_MODEL"}  # a model of the packaged pipelines is called as a target is
OTHER_DEVICES = (  # torch's, and kinds of memory
    "backends/pytorch/torch_model.py",
    "backends/tensorrtllm/gauges.py",
    "evaluation/baseline/hf.py",
)


def rooms(names: Collection[str]) -> tuple[str, ...]:
    return tuple(f"{place}/{name}/" for place in ("builder/targets", "engine") for name in names)


def branches(package: Path, names: Collection[str], own: Collection[str]) -> list[str]:
    """`file:line` of whatever asks for one of the targets `names` outside the files that begin with one of `own`."""
    modules = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))
    }
    inside = {file: tree for file, tree in modules.items() if file.startswith(tuple(own))}
    classes = {node.name for tree in inside.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    classes -= set(dir(collections.abc))  # a room has a Mapping of its own
    outside = {file: tree for file, tree in modules.items() if file not in (*inside, *REGISTRIES, *OTHER_DEVICES)}
    aliases = {name for tree in modules.values() for name in constants(tree, names)} - NOT_A_TARGET
    asking = Asking(frozenset(names), frozenset(aliases), frozenset(classes))
    return [f"{file}:{line}" for file, tree in outside.items() for line in sorted(set(asking.lines(tree)))]


def constants(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    """Names of a module's constants that are a target's name."""
    for node in tree.body:
        match node:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                pairs = zip(targets, values, strict=True)
            case ast.Assign([target], value) | ast.AnnAssign(target, value=ast.expr() as value):
                pairs = zip([target], [value], strict=True)
            case _:
                continue
        for target, value in pairs:
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and value.value in names:
                yield target.id


@dataclass(frozen=True)
class Asking:
    names: frozenset[str]
    aliases: frozenset[str]  # constants that hold a name
    classes: frozenset[str]  # defined in a target's rooms

    def lines(self, tree: ast.AST) -> Iterator[int]:
        methods = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}  # tensor.cpu()
        for node in ast.walk(tree):
            if id(node) not in methods and self._asks(node):
                yield node.lineno  # type: ignore[attr-defined]

    def _asks(self, node: ast.AST) -> bool:
        match node:
            case ast.Compare(left, ops, comparators):
                operands = (left, *comparators)
                is_looked_up = all(isinstance(op, ast.In | ast.NotIn) for op in ops)
                is_compared = any(map(_is_target, operands)) and not is_looked_up and not any(map(_is_none, operands))
                return is_compared or any(map(self._names_one, operands))
            case ast.MatchValue(value):
                return self._names_one(value)
            case ast.Dict(keys):
                return any(key is not None and self._names_one(key) for key in keys)
            case ast.Subscript(slice=key):
                return self._names_one(key)
            case ast.Call(ast.Attribute(attr="get" | "pop" | "startswith" | "setdefault"), [key, *_]):
                return self._names_one(key)
            case ast.Attribute(attr=attribute):
                return attribute in self.names  # options.tensorrt_llm
            case ast.Call(ast.Name(id="isinstance" | "issubclass"), [_, kinds]):
                return any(_last_name(kind) in self.classes for kind in ast.walk(kinds))
            case ast.MatchClass(kind):
                return _last_name(kind) in self.classes
        return False

    def _names_one(self, node: ast.expr) -> bool:
        match node:
            case ast.Constant(value):
                return value in self.names
            case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
                return any(map(self._names_one, elements))
        return _last_name(node) in self.aliases


def _is_target(node: ast.expr) -> bool:
    return _last_name(node) == "target"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
