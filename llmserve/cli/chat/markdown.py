"""Shows an answer on a terminal as it comes, and each complete line again with its markdown rendered.

rich renders whole documents; single lines only need a few kinds of markup. Control characters, which could move the
cursor or change the terminal, are removed.
"""

from __future__ import annotations

import re
import sys
from typing import Protocol

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
HEADING = re.compile(r"(#{1,6})\s+(.*)")
BULLET = re.compile(r"(\s*)[-*+]\s+(.*)")
QUOTE = re.compile(r"\s*>\s?(.*)")
RULE = re.compile(r"\s*([-*_])\s*(\1\s*){2,}$")
FENCE = re.compile(r"\s*(```|~~~)\s*(\S*)")
INLINE = re.compile(
    r"`(?P<code>[^`]+)`"
    r"|\*\*(?P<bold>\S(?:.*?\S)?)\*\*|(?<!\w)__(?P<strong>\S(?:.*?\S)?)__(?!\w)"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^*]*[^\s*])?)\*(?![\w*])|(?<!\w)_(?P<stressed>[^\s_](?:[^_]*[^\s_])?)_(?!\w)"
    r"|\[(?P<text>[^\]]+)\]\((?P<link>[^)\s]+)\)"
)
STYLES = {
    "code": "cyan",
    "bold": "bold",
    "strong": "bold",
    "italic": "italic",
    "stressed": "italic",
    "text": "underline",
}


class AnswerDisplay(Protocol):
    def show(self, text: str) -> None:
        """Show more of the answer."""
        ...

    def end(self, note: str = "") -> None:
        """End the answer with a note and a new line."""
        ...


class PlainDisplay:
    """Shows an answer unchanged, for pipes."""

    def show(self, text: str) -> None:
        print(text, end="", flush=True)

    def end(self, note: str = "") -> None:
        print(note)


class MarkdownDisplay:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._line = ""  # the incomplete line, which is on the screen unrendered
        self._is_code = False

    def show(self, text: str) -> None:
        *whole, rest = CONTROL.sub("", text).replace("\t", "    ").split("\n")
        for line in whole:
            self._write(line)
            self._render()
        self._write(rest)
        self._console.file.flush()

    def end(self, note: str = "") -> None:
        self._render(note)

    def _write(self, text: str) -> None:
        self._line += text
        self._console.file.write(text)

    def _render(self, note: str = "") -> None:
        """Replace the line on the screen by its rendered form, unless it is taller than the screen."""
        line, self._line = self._line, ""
        rows = max(-(-cell_len(line) // self._console.width), 1)
        if rows >= self._console.height:
            self._console.file.write(f"{note}\n")
            return
        self._console.file.write("\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J")
        self._console.print(self._styled(line).append(note), soft_wrap=self._is_code)

    def _styled(self, line: str) -> Text:
        if fence := FENCE.match(line):
            self._is_code = not self._is_code
            return Text(fence[2], "dim italic")
        return Text(line, "cyan") if self._is_code else styled_line(line)


def styled_line(line: str) -> Text:
    """Render the markup of a line outside code."""
    if RULE.match(line):
        return Text("─" * 40, "dim")
    if heading := HEADING.match(line):
        return _inline(heading[2], "bold underline" if len(heading[1]) == 1 else "bold")
    if bullet := BULLET.match(line):
        return Text(f"{bullet[1]}• ").append_text(_inline(bullet[2]))
    if quote := QUOTE.match(line):
        return Text("│ ", "dim").append_text(_inline(quote[1], "italic"))
    return _inline(line)


def _inline(text: str, style: str = "") -> Text:
    found, place = Text(style=style), 0
    for match in INLINE.finditer(text):
        assert match.lastgroup is not None
        kind = "text" if match.lastgroup == "link" else match.lastgroup
        found.append(text[place : match.start()]).append(match[kind], STYLES[kind])
        if match["link"]:
            found.append(f" ({match['link']})", "dim")
        place = match.end()
    return found.append(text[place:])


def answer_display(*, wants_markdown: bool) -> AnswerDisplay:
    """The display that suits standard output."""
    console = Console(file=sys.stdout, highlight=False)
    if wants_markdown and console.is_terminal and not console.is_dumb_terminal:
        return MarkdownDisplay(console)
    return PlainDisplay()
