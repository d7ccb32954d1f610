"""lm-evaluation-harness, in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HARNESS = str(ROOT / ".venv-harness/bin/python")

needs_harness = pytest.mark.skipif(
    not (ROOT / ".venv-harness/.created").is_file(), reason="no harness: make .venv-harness/.created"
)
