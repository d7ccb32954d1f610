"""How the tensors of a config become the arguments of a module's `forward`, and its result the outputs.

As in Triton: inputs are matched by the names of forward's arguments if all have such names, else by the number in
`<name>__<number>`, else by their order in the config. Outputs are matched by key if forward returns a dict, else by
number, else by order. A forward with one dict as its argument receives all inputs in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmserve.errors import InternalError, InvalidArgument, ModelConfigError

_NUMBERED = re.compile(r".+__(\d+)")


@dataclass(frozen=True, slots=True)
class Arguments:
    """What is known about a module's forward. No names: unknown, so names cannot be checked."""

    names: tuple[str, ...] = ()
    num_positional: int = 0  # number of positional-only arguments
    takes_dict: bool = False


@dataclass(frozen=True, slots=True)
class InputBinding:
    """All inputs in a dict; or inputs by position, and the rest by keyword."""

    in_dict: bool = False
    places: Mapping[str, int] = field(default_factory=dict)

    def bind(self, tensors: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments."""
        if self.in_dict:
            return [dict(tensors)], {}
        ordered = sorted(tensors.keys() & self.places.keys(), key=self.places.__getitem__)
        for place, name in enumerate(ordered):
            if self.places[name] != place:
                raise InvalidArgument(f"input '{name}' is argument {self.places[name]}; argument {place} is missing")
        keywords = {name: tensor for name, tensor in tensors.items() if name not in self.places}
        return [tensors[name] for name in ordered], keywords


def bind_inputs(names: Sequence[str], arguments: Arguments) -> InputBinding:
    if arguments.takes_dict:
        return InputBinding(in_dict=True)
    if arguments.names and set(names) <= set(arguments.names):
        by_place = arguments.names[: arguments.num_positional]
        return InputBinding(places={name: place for place, name in enumerate(by_place)})
    return InputBinding(places=_places("input", names))


def _places(kind: str, names: Sequence[str]) -> dict[str, int]:
    matches = [_NUMBERED.fullmatch(name) for name in names]
    if not all(matches):
        return {name: place for place, name in enumerate(names)}
    places = {name: int(match[1]) for name, match in zip(names, matches, strict=True) if match}
    if len(set(places.values())) < len(places):
        raise ModelConfigError(f"two {kind}s have the same number: {', '.join(sorted(places))}")
    return places


class OutputBinding:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._places = _places("output", names)

    def pick(self, result: Any) -> dict[str, Any]:
        """The declared outputs, from what forward returned."""
        if isinstance(result, Mapping):
            if missing := [name for name in self._names if name not in result]:
                raise InternalError(
                    f"the model returned a dict with keys {', '.join(map(str, result))}; it lacks {', '.join(missing)}"
                )
            return {name: result[name] for name in self._names}
        results = list(result) if _is_sequence_of_results(result) else [result]
        if too_high := [name for name, place in self._places.items() if place >= len(results)]:
            raise InternalError(f"the model returned {len(results)} outputs; it lacks {', '.join(too_high)}")
        return {name: results[place] for name, place in self._places.items()}


def _is_sequence_of_results(result: Any) -> bool:
    """A tuple or list of results; a list of strings is one result."""
    return isinstance(result, tuple | list) and not all(isinstance(element, str) for element in result)
