'''Reads questions from the keyboard, or from a pipe with one per line.

A line that ends with a backslash continues in the next one. """ begins and ends a text of several lines. A terminal has
line editing, completion with Tab, and a history that is stored.
'''

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

PROMPT, MORE = "you> ", "...> "
QUOTES = '"""'
MAX_HISTORY = 1000  # lines
Candidates = Callable[[str, str], Sequence[str]]  # (line so far, its last word) -> completions of the word


def history_file() -> Path:
    """The history's file, in XDG's folder for state."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return Path(state if Path(state).is_absolute() else Path.home() / ".local/state", "llmserve/chat_history")


class Keyboard:
    """Raises `EOFError` at the end of input, and `KeyboardInterrupt` for Ctrl-C at an empty prompt."""

    def __init__(self, candidates: Candidates, history: Path | None, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._history = history if is_terminal else None
        if is_terminal:
            self._prepare(candidates)

    def read(self) -> str:
        while True:
            first = self._line(PROMPT).strip()
            try:
                if first.startswith(QUOTES):
                    return self._quoted(first.removeprefix(QUOTES)).strip("\n")
                return self._continued(first)
            except KeyboardInterrupt:  # drops the unfinished text
                print()

    def close(self) -> None:
        """Store the history, readable by its owner only."""
        if self._history is None:
            return
        import readline

        with suppress(OSError):  # a chat works without its history
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            readline.set_history_length(MAX_HISTORY)
            readline.write_history_file(self._history)

    def _line(self, prompt: str) -> str:
        return input(prompt if self._is_terminal else "")

    def _continued(self, line: str) -> str:
        lines = [line]
        with suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._line(MORE).rstrip())
        return "\n".join(lines)

    def _quoted(self, line: str) -> str:
        lines = [line]
        with suppress(EOFError):
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(self._line(MORE))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines)

    def _prepare(self, candidates: Candidates) -> None:
        # enables line editing in input(); without a terminal, it may write to standard output
        import readline

        found: list[str] = []

        def complete(word: str, state: int) -> str | None:
            if state == 0:
                found[:] = candidates(readline.get_line_buffer()[: readline.get_begidx()], word)
            return found[state] if state < len(found) else None

        readline.set_completer_delims(" \t=")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")
        if self._history is not None:
            with suppress(OSError):
                readline.read_history_file(self._history)


def path_candidates(word: str) -> list[str]:
    """Files and folders whose path begins with `word`."""
    folder, begun = os.path.split(word)
    with suppress(OSError):
        entries = sorted(os.scandir(Path(folder or ".").expanduser()), key=lambda entry: entry.name)
        return [
            os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "")
            for entry in entries
            if entry.name.startswith(begun) and (begun or not entry.name.startswith("."))
        ]
    return []
