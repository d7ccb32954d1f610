"""A table of facts for the terminal: names in bold, and texts, which are not parsed as markup."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, said in facts:
        table.add_row(Text(name), Text(said))
    return table
