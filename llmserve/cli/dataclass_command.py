"""Commands whose options are the fields of a dataclass, because they have too many for a signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")
DECLARED = "declared"  # key of a field's metadata: its declaration for typer


def option(default: Any, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """A field that is an option. The default `...` makes it required.

    `names`: replace the field's name, without --no-NAME. `more`: arguments of typer.Option.
    """
    more.setdefault("show_default", default not in (None, ""))
    return _field(default, typer.Option(*names, help=help, rich_help_panel=panel, **more))


def argument(default: Any, help: str, **more: Any) -> Any:
    """A field that is an argument. The parameters are those of `option`."""
    return _field(default, typer.Argument(help=help, **{"show_default": False, **more}))


def _field(default: Any, declared: Any) -> Any:
    return field(default=MISSING if default is ... else default, metadata={DECLARED: declared})


def _declared(options: type) -> dict[str, Any]:
    """Declarations of the fields that `option` or `argument` made."""
    return {each.name: each.metadata[DECLARED] for each in fields(options) if DECLARED in each.metadata}


class DataclassCommand(Generic[Options]):
    """Register it with typer, which reads the signature. A field may also be `Annotated[type, typer.Option()]`."""

    def __init__(self, options: type[Options], run: Callable[[Options], None]) -> None:
        self.__name__ = run.__name__
        self.__doc__ = run.__doc__
        hints = get_type_hints(options, include_extras=True)
        self.__annotations__ = hints | {name: Annotated[hints[name], told] for name, told in _declared(options).items()}
        signature = inspect.signature(options)
        self.__signature__ = signature.replace(
            parameters=[each.replace(annotation=self.__annotations__[n]) for n, each in signature.parameters.items()]
        )
        self._options = options
        self._run = run

    def __call__(self, **values: Any) -> None:
        self._run(self._options(**values))
