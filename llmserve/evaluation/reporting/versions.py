"""Versions that can change a number in a report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "llmserve", "numpy", "rouge-score", "sacrebleu", "jsonschema", "datasets", "sentencepiece", "tokenizers", "torch",
    "transformers",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a number in a report; missing packages are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
