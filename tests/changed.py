"""The unit tests beside what differs from main, for `make test-fast`: prints paths below tests/.

A file llmserve/a/b.py is tested by tests/a/test_b.py where that exists, else by the tests in tests/a.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tiers import tier_of

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = "tests/test_laws.py"


def changed_files() -> list[str]:
    """Committed since main, or not committed yet."""
    commands = ["git diff --name-only main...", "git diff --name-only HEAD", "git ls-files --others --exclude-standard"]
    lines: set[str] = set()
    for command in commands:
        lines |= set(subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True).stdout.splitlines())
    return sorted(lines)


def tests_of(path: str) -> set[str]:
    """Of one changed file, those that exist."""
    parts = Path(path).parts
    if not parts or parts[0] not in ("llmserve", "tests") or Path(path).suffix != ".py":
        return set()
    if parts[0] == "tests":
        return {path} if parts[-1].startswith("test_") else set()
    mirror = ROOT / "tests" / Path(*parts[1:-1])
    own = mirror / f"test_{parts[-1]}"
    found = [own] if own.is_file() else list(mirror.glob("test_*.py"))
    return {file.relative_to(ROOT).as_posix() for file in found} if mirror != ROOT / "tests" or own.is_file() else set()


def main() -> None:
    found = {test for path in changed_files() for test in tests_of(path) if (ROOT / test).is_file()}
    print(*sorted({ALWAYS} | {test for test in found if tier_of(test.removeprefix("tests/")) == "unit"}))


if __name__ == "__main__":
    main()
