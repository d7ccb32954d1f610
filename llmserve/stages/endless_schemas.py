"""JSON schemas whose every value is endless, as that of an object which requires another one of its kind.

Only what is sure counts: keywords that are not read here, and schemas that are deep or take long, count as finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import unquote

MAX_STEPS = 2_000


def endless_problem(schema: Any) -> str:
    """Names a part that comes back to itself, and that every value needs. Empty: there may be a finite one."""
    try:
        part = _Search(schema).part(schema, "#", ())
    except RecursionError:
        return ""
    return part and f"every value would be endless, because {part} requires itself; make it optional"


class _Search:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._ends: set[str] = set()  # paths that `$ref` names
        self._num_steps = 0

    def part(self, schema: Any, path: str, begun: Sequence[str]) -> str:
        """`begun`: paths of which this is a part."""
        self._num_steps += 1
        if self._num_steps > MAX_STEPS or not isinstance(schema, Mapping):
            return ""
        for key in ("anyOf", "oneOf"):
            parts = [self.part(each, f"{path}/{key}/{i}", begun) for i, each in enumerate(_list(schema.get(key)))]
            if parts and all(parts):
                return parts[0]
        needed = [(f"allOf/{i}", each) for i, each in enumerate(_list(schema.get("allOf")))]
        if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), Mapping):
            names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
            needed += [(f"properties/{name}", properties.get(name)) for name in names]
        if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int) and least > 0:
            first = _list(schema.get("prefixItems"))
            needed += [(f"prefixItems/{i}", each) for i, each in enumerate(islice(first, least))]
            needed += [("items", schema.get("items"))] if least > len(first) else []
        found = (self.part(each, f"{path}/{place}", begun) for place, each in needed)
        return next(filter(None, found), "") or self._reference(schema.get("$ref"), path, begun)

    def _reference(self, name: Any, path: str, begun: Sequence[str]) -> str:
        if not isinstance(name, str) or name in self._ends:
            return ""
        if name in begun:
            return path
        if not (found := self.part(self._at(name), name, (*begun, name))):
            self._ends.add(name)
        return found

    def _at(self, name: str) -> Any:
        """None where a `$ref` leads nowhere here."""
        root, *keys = unquote(name).split("/")
        here = self._root if root == "#" else None
        for key in keys:
            key = key.replace("~1", "/").replace("~0", "~")
            here = here.get(key) if isinstance(here, Mapping) else None
        return here


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
