"""What Linux says about the files that this process has mapped."""

from __future__ import annotations

import re
from pathlib import Path


def mapping_of(path: Path) -> str:
    """The entry of `path` in smaps."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    return next(entry for entry in entries[1:] if str(path) in entry.splitlines()[0])
