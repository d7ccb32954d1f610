"""A machine with GPUs and a release of TensorRT-LLM, for this process or for one that it starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAKES = Path(__file__).resolve().parent
ROOT = FAKES.parents[1]
RELEASES = {"1.2": FAKES / "tensorrt_llm_1_2", "1.3": FAKES / "tensorrt_llm_1_3"}


def altered(release: str, folder: Path, changes: dict[str, tuple[str, str]]) -> str:
    """A release in which something differs: file -> (text, what stands there instead). To be given as a release."""
    shutil.copytree(RELEASES[release], folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (before, after) in changes.items():
        text = (folder / "tensorrt_llm" / name).read_text()
        assert before in text, f"{name} has no {before!r}"
        (folder / "tensorrt_llm" / name).write_text(text.replace(before, after))
    return str(folder)


def environment(release: str, **settings: str) -> dict[str, str]:
    """For a process; it needs the repository on its path too, where the fakes' shared part is."""
    paths = [str(RELEASES.get(release, release)), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": f"{FAKES / 'gpu'}{os.pathsep}{os.environ['PATH']}",
        **settings,
    }


@contextmanager
def gpu_machine(release: str, **settings: str) -> Iterator[None]:
    """Within, this process and those that it spawns are on that machine."""
    before, path = dict(os.environ), list(sys.path)
    os.environ.update(environment(release, **settings))
    sys.path[:0] = [str(RELEASES.get(release, release)), str(ROOT)]
    _forget()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path
        _forget()


def _forget() -> None:
    """Another release may be imported next."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "tensorrt")]:
        del sys.modules[name]
