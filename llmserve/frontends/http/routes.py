"""Finds the handler of a path. Paths match exactly, segment by segment; a `{parameter}` matches any segment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from llmserve.wire.http1.answers import Answer
from llmserve.wire.http1.connection import Handler
from llmserve.wire.http1.request import Request

Guard: TypeAlias = Callable[[Request], Answer | None]  # returns the answer to a refused request, else None

PARAMETER = ""  # no path has an empty segment
NUM_REMEMBERED = 64  # paths; clients request few paths, repeatedly


@dataclass(slots=True)
class _Node:
    """The segments that may follow a prefix of a path."""

    children: dict[str, _Node] = field(default_factory=dict)
    parameter: str = ""  # the parameter name of `children[PARAMETER]`
    methods: dict[str, Handler] = field(default_factory=dict)
    guard: Guard | None = None


@dataclass(frozen=True, slots=True)
class Found:
    handler: Handler | None  # None: the path does not support the method
    params: Mapping[str, str]
    guard: Guard | None  # of the path, for all methods
    methods: Sequence[str]


class Routes:
    def __init__(self) -> None:
        self._root = _Node()
        self.find = functools.lru_cache(NUM_REMEMBERED)(self._find)  # (method, path)

    def add(self, method: str, path: str, handler: Handler, guard: Guard | None = None) -> None:
        node = self._root
        for segment in _segments(path):
            is_parameter = segment.startswith("{")
            child = node.children.setdefault(PARAMETER if is_parameter else segment, _Node())
            if is_parameter:
                node.parameter = segment[1:-1]
            node = child
        node.methods[method] = handler
        node.guard = guard
        self.find.cache_clear()

    def _find(self, method: str, path: str) -> Found | None:
        """Returns None for an unknown path. A parameter called version only matches digits."""
        params: dict[str, str] = {}
        node = _descend(self._root, _segments(path), 0, params) if path.startswith("/") else None
        return None if node is None else Found(node.methods.get(method), params, node.guard, [*node.methods])


def _segments(path: str) -> list[str]:
    return [] if path == "/" else path.split("/")[1:]


def _descend(node: _Node, segments: Sequence[str], depth: int, params: dict[str, str]) -> _Node | None:
    """The node of a path. A literal segment is preferred to a parameter."""
    if depth == len(segments):
        return node if node.methods else None
    segment = segments[depth]
    if segment == PARAMETER:
        return None
    named = node.children.get(segment)
    if named is not None and (found := _descend(named, segments, depth + 1, params)) is not None:
        return found
    child = node.children.get(PARAMETER)
    if child is None or (node.parameter == "version" and not (segment.isascii() and segment.isdigit())):
        return None
    found = _descend(child, segments, depth + 1, params)
    if found is not None:
        params[node.parameter] = segment
    return found
