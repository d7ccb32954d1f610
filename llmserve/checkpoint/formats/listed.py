"""Lists of modules in quantization configs: names, prefixes and suffixes of names, and patterns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase

MAX_PATTERN = 200
MAX_REPEATS = 6
SLOW = re.compile(r"\)[*+{]|\(\?P=|\\[1-9]")  # constructs that can make a search take exponential time


class Pattern:
    """A regular expression that matches from a name's start. Raises ValueError if it is invalid or slow."""

    def __init__(self, text: str) -> None:
        repeats = len(re.findall(r"[*+{]", text))
        if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or SLOW.search(text):
            raise ValueError(f"pattern {text[:MAX_PATTERN]!r} is too complex")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._compiled = re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"pattern {text!r} is invalid: {error}") from error

    def matches(self, module: str) -> bool:
        return self._compiled.match(module) is not None


class ListedModules:
    """The modules that a list matches.

    An entry is a module's name, the name of a module that contains it, or the end of its name. `*` matches any
    characters; `re:` introduces a regular expression.
    """

    def __init__(self, entries: Sequence[str] = ()) -> None:
        """Raises ValueError for a bad pattern."""
        self._patterns = [Pattern(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
        plain = [entry for entry in entries if not entry.startswith("re:")]
        self._globs = [entry for entry in plain if "*" in entry]
        self._names = [entry for entry in plain if "*" not in entry]

    def __contains__(self, module: str) -> bool:
        return (
            any(pattern.matches(module) for pattern in self._patterns)
            or any(fnmatchcase(module, entry) for entry in self._globs)
            or any(f".{module}.".startswith(f".{name}.") or f".{module}".endswith(f".{name}") for name in self._names)
        )


def listed_modules(value: object, key: str, problems: list[str]) -> ListedModules:
    """Read a config's value: a list of strings, or null."""
    entries = value if value is not None else []
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        problems.append(f"{key} must be a list of module names, got {value!r}")
        return ListedModules()
    try:
        return ListedModules(entries)
    except ValueError as error:
        problems.append(f"{key}: {error}")
        return ListedModules()
