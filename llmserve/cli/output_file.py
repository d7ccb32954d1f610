"""Files for results. Checks that they can be written before the work that creates them."""

from __future__ import annotations

from pathlib import Path

from llmserve.errors import InvalidArgument


def check_writable(path: Path) -> None:
    """Raises `InvalidArgument`. Keeps the file's content, and leaves no new file behind."""
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"{path} cannot be written: no such directory: {path.absolute().parent}")
    target = path.resolve()
    is_there = target.exists()
    if is_there and not (target.is_file() or target.is_dir()):
        return  # a pipe: its reader would see the end
    try:
        target.open("ab").close()
        if not is_there:
            target.unlink()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from error


def write_file(path: Path, text: str) -> None:
    """Raises `InvalidArgument`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error.strerror}") from error
