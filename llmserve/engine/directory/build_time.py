"""How long a build took, in a file next to the engine, not in the manifest, so that equal builds have equal bytes.

Nothing depends on it. If the file is missing or unreadable, the build time is unknown.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from llmserve.engine.machine.description import machine_name

BUILD_TIME_FILE = "build_time.json"


@dataclass(frozen=True, slots=True)
class BuildTime:
    seconds: float
    machine: str  # the machine that built it: see `machine_name`

    @classmethod
    def load(cls, engine: Path) -> BuildTime | None:
        try:
            content = json.loads((engine / BUILD_TIME_FILE).read_text())
            return cls(float(content["seconds"]), str(content["machine"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def save(self, engine: Path) -> None:
        (engine / BUILD_TIME_FILE).write_text(json.dumps(asdict(self)) + "\n")

    def here(self) -> float | None:
        """Seconds, if the build ran on a machine like this one."""
        return self.seconds if self.machine == machine_name() else None

    def __str__(self) -> str:
        return f"{self.seconds:,.1f} s on {self.machine}"
