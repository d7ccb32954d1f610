"""A command whose options are the fields of a dataclass, for commands with more of them than a signature can show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_type_hints

Options = TypeVar("Options")


class DataclassCommand(Generic[Options]):
    """To be registered with typer, which reads the signature: fields are `Annotated[type, typer.Option(...)]`."""

    def __init__(self, options: type[Options], run: Callable[[Options], None]) -> None:
        self.__name__ = run.__name__
        self.__doc__ = run.__doc__
        self.__annotations__ = get_type_hints(options, include_extras=True)
        signature = inspect.signature(options)
        self.__signature__ = signature.replace(
            parameters=[each.replace(annotation=self.__annotations__[n]) for n, each in signature.parameters.items()]
        )
        self._options = options
        self._run = run

    def __call__(self, **values: Any) -> None:
        self._run(self._options(**values))
