"""`--help` of every command: options under the headings of their panels, each flag's name whole whatever the width."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

OPTIONS = "Options"
ARGUMENTS = "Arguments"
DEFAULT_COMMAND = "run"


class GroupedHelpCommand(TyperCommand):
    """For an app without rich help, whose tables cut long flags off at 80 columns."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Of a group's default command as if it were the group."""
        formatter.write_usage(ctx.command_path.strip(), " ".join(self.collect_usage_pieces(ctx)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            heading = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or heading, []).append(record)
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class DefaultCommandGroup(TyperGroup):
    """`llmserve NAME ARGUMENTS` with commands of its own: what begins with none of their names is for the one that is
    called DEFAULT_COMMAND, `--help` too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == DEFAULT_COMMAND else name, command, rest
