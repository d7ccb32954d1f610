"""Markdown of a line, and what stands on the screen after a stream of pieces."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from llmserve.cli.chat.markdown import MarkdownDisplay, PlainDisplay, styled_line


@pytest.mark.parametrize(
    ("line", "plain", "styles"),
    [
        ("plain 2 * 3 * 4, snake_case_name", "plain 2 * 3 * 4, snake_case_name", []),
        ("a **b c** d", "a b c d", [("b c", "bold")]),
        ("`x = *y*` and *z*", "x = *y* and z", [("x = *y*", "cyan"), ("z", "italic")]),
        ("_stressed_ __strong__", "stressed strong", [("stressed", "italic"), ("strong", "bold")]),
        (
            "[here](https://x.example)",
            "here (https://x.example)",
            [("here", "underline"), (" (https://x.example)", "dim")],
        ),
        ("## Title with `code`", "Title with code", [("code", "cyan")]),
        ("  * item **one**", "  • item one", [("one", "bold")]),
        ("> said", "│ said", [("said", "italic")]),
        ("---", "─" * 40, []),
        ("[bold]no markup of rich[/bold]", "[bold]no markup of rich[/bold]", []),
        ("** not bold ** `", "** not bold ** `", []),
    ],
)
def test_marks_of_a_line(line: str, plain: str, styles: list[tuple[str, str]]) -> None:
    text = styled_line(line)
    assert text.plain == plain
    assert [(text.plain[span.start : span.end], str(span.style)) for span in text.spans if span.style] == styles


def screen(written: str, width: int) -> list[str]:
    """What a terminal shows of it: wrapping, carriage return, up, erase below; styles are left out."""
    rows, row, column, place = [""], 0, 0, 0
    while place < len(written):
        letter = written[place]
        place += 1
        if letter == "\x1b":
            end = next(i for i in range(place, len(written)) if written[i].isalpha())
            count, kind = written[place + 1 : end], written[end]
            place = end + 1
            if kind == "A":
                row -= int(count)
            elif kind == "J":
                rows[row:] = [rows[row][:column]]
        elif letter == "\r":
            column = 0
        else:
            if letter == "\n" or column == width:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            if letter != "\n":
                rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
                column += 1
    return [line.rstrip() for line in rows]


ANSWER = """# Title
Some **bold** words, so many that they need more than a single row of this narrow terminal, in fact even three of them.
- one
```python
def f(x):  # **not bold**
    return x
```
The `end`."""
SHOWN = [
    "Title",
    "Some bold words, so many that they need",
    "more than a single row of this narrow",
    "terminal, in fact even three of them.",
    "• one",
    "python",
    "def f(x):  # **not bold**",
    "    return x",
    "",
    "The end.",
    "",
]


@pytest.mark.parametrize("size", [1, 3, 40, 1000])
def test_each_line_is_shown_again_when_it_is_whole(size: int) -> None:
    out = io.StringIO()
    display = MarkdownDisplay(Console(file=out, force_terminal=True, width=40, height=24, highlight=False))
    for place in range(0, len(ANSWER), size):
        display.show(ANSWER[place : place + size])
        if size == 1 and place == 15:
            assert screen(out.getvalue(), 40)[-1] == "Some **b"  # as it comes
    display.end()
    assert screen(out.getvalue(), 40) == SHOWN


def test_a_line_that_has_left_the_screen_stays_as_it_is() -> None:
    out = io.StringIO()
    display = MarkdownDisplay(Console(file=out, force_terminal=True, width=10, height=4, highlight=False))
    display.show("**word** " * 20)
    display.end(" [cancelled]")
    assert out.getvalue() == "**word** " * 20 + " [cancelled]\n"


def test_what_a_terminal_would_obey_never_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    display = MarkdownDisplay(Console(file=out, force_terminal=True, width=40, height=24, highlight=False))
    display.show("a\x1b[2J\x07\x9b31m\x08b\r\tc")
    display.end()
    assert screen(out.getvalue(), 40) == ["a[2J31mb    c", ""]
    plain = PlainDisplay()
    plain.show("as \x1b[1mit is")
    plain.end(" [cancelled]")
    assert capsys.readouterr().out == "as \x1b[1mit is [cancelled]\n"
