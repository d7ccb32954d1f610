"""Sidecars: files of an engine directory that change no answer, so a model is not reloaded when they change."""

from __future__ import annotations

from collections.abc import Iterable

MANIFEST = "manifest.json"  # of an engine directory
SIDECARS = frozenset(("build_time.json", "gate.jsonl", "model.cache"))


def served_files(files: Iterable[str]) -> set[str]:
    """The paths of a model's files, without sidecars."""
    every = set(files)
    engines = {folder for folder, name in map(_split, every) if name == MANIFEST}
    return {file for file in every if _split(file)[1] not in SIDECARS or _split(file)[0] not in engines}


def _split(file: str) -> tuple[str, str]:
    folder, _, name = file.rpartition("/")
    return folder, name
