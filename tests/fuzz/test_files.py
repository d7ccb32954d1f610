"""Files and bodies that nobody here wrote: the corpus, and some seconds of new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.file_targets import file_targets
from tests.fuzz.target import Target, fuzz
from tests.fuzz.wire_targets import body_targets

SECONDS = 2.5  # for each
TARGETS = {target.name: target for target in (*file_targets(), *body_targets())}
CASES = [
    pytest.param(target, path, id=f"{name}-{path.stem}") for name, target in TARGETS.items() for path in target.corpus
]


@pytest.mark.parametrize(("target", "path"), CASES)
def test_the_corpus(target: Target, path: Path) -> None:
    target.check(path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs(name: str) -> None:
    assert fuzz(TARGETS[name], SECONDS) > 0
