"""Prints the packages that an extra of pyproject.toml requires: pip installs them while the kernels compile.

python -m tools.requirements check > requirements.txt
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

OWN = "llmserve["  # an extra may name other extras of llmserve


def of_extra(project: Mapping[str, Any], extra: str) -> Iterator[str]:
    for line in project["optional-dependencies"][extra]:
        if line.startswith(OWN):
            for other in line.removeprefix(OWN).removesuffix("]").split(","):
                yield from of_extra(project, other)
        else:
            yield line


def main() -> None:
    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    print("\n".join([*project["dependencies"], *of_extra(project, sys.argv[1])]))


if __name__ == "__main__":
    main()
