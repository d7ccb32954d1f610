"""`--help` of every command: options under the headings of their panels, each flag's name whole whatever the width."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

OPTIONS = "Options"
ARGUMENTS = "Arguments"


class GroupedHelpCommand(TyperCommand):
    """For an app without rich help, whose tables cut long flags off at 80 columns."""

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
