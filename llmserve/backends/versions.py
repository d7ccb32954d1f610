"""Files of a model's newest version, which auto-complete reads before the served versions are known."""

from __future__ import annotations

from pathlib import Path


def newest_version_file(model_dir: Path, filename: str) -> Path | None:
    versions = sorted((int(path.name), path) for path in model_dir.iterdir() if path.name.isdecimal())
    paths = [path / filename for _, path in versions]
    return next((path for path in reversed(paths) if path.exists()), None)
