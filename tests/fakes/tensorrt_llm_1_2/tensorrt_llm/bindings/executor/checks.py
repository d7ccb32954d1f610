"""Types are checked as the compiled bindings check them."""

from pathlib import Path
from typing import Any

import torch


def check(name: str, value: Any, kind: Any, *, optional: bool = False) -> None:
    """As the bindings refuse: numpy numbers are no ints, an int is no list."""
    if optional and value is None:
        return
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted and not (kind in (torch.Tensor, Path) and isinstance(value, kind)):
        raise TypeError(f"__init__(): incompatible function arguments: {name}={value!r} is not {kind.__name__}")


def check_list(name: str, value: Any, kind: Any) -> None:
    check(name, value, list)
    for item in value:
        check(name, item, kind)
