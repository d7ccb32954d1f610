"""The class of all commands. `--help` groups options by panel and never truncates a flag's name. All problems of a
command line are reported at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

from llmserve.cli.old_flags import OldFlags, Translation, say_without_effect
from llmserve.errors import InvalidArgument, raise_problems

OPTIONS = "Options"
ARGUMENTS = "Arguments"
MOST_USED = "Most used options"
LEAST_ALIKE, MOST_NEAR = 0.7, 3  # similarity and number of suggested names


class GroupedHelpCommand(TyperCommand):
    """For an app without rich help, whose tables truncate long flags at 80 columns."""

    most_used: ClassVar[Collection[str]] = ()  # parameters that are shown first
    old_flags: ClassVar[OldFlags] = OldFlags.of({}, {}, {})  # of the program that it replaces

    def translated(self, args: Sequence[str]) -> Translation:
        return self.old_flags.translate(args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        done = self.translated(args)
        if "--help" not in args:
            problems = [*done.problems, *self._problems(ctx, done.arguments)]
            raise_problems(InvalidArgument, f"llmserve {ctx.info_name}", problems)
            say_without_effect(done.without_effect)
        return super().parse_args(ctx, done.arguments)

    def _problems(self, ctx: Any, arguments: Sequence[str]) -> Iterator[str]:
        """All problems. The parser itself stops at the first one."""
        options: dict[str, Any] = {
            name: one for one in self.get_params(ctx) for name in (*one.opts, *one.secondary_opts)
        }
        spelled = ctx.token_normalize_func or str
        rest = deque(arguments)
        while rest and (argument := rest.popleft()) != "--":
            written, equals, value = argument.partition("=")
            if not written.startswith("--"):
                continue
            option = options.get(spelled(written))
            if option is None:
                yield f"no option {written}{self._nearest(spelled(written), options)}"
            elif not option.is_flag and (equals or rest):
                given = value if equals else rest.popleft()
                try:
                    option.process_value(ctx, [given] if option.multiple else given)
                except typer.BadParameter as error:
                    yield f"{written}: {error.message}"

    def _nearest(self, written: str, options: Collection[str]) -> str:
        old = [name for name in self.old_flags.takes if len(name) > 2]
        own = [name.removeprefix("--") for name in options if name.startswith("--")]
        name = written.removeprefix("--")
        found = get_close_matches(name, [*own, *old], n=1, cutoff=LEAST_ALIKE)
        if not found:  # a part of a name: --prot is --http-port
            found = [each for each in own if get_close_matches(name, each.split("-"), cutoff=LEAST_ALIKE)][:MOST_NEAR]
        if not found:
            return f"; llmserve {self.name} --help lists the options"
        return f"; did you mean {' or '.join(f'--{each}' for each in found)}?"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], MOST_USED: [], OPTIONS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            heading = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            topic = MOST_USED if parameter.name in self.most_used else getattr(parameter, "rich_help_panel", None)
            groups.setdefault(topic or heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
