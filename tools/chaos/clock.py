"""Shifts the wall clock of programs started with `environment`, because setting the machine's clock needs root."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


class Clock:
    """`folder` gets the compiled shim and the file with the offset. Raises `CalledProcessError` without a compiler."""

    def __init__(self, folder: Path) -> None:
        self._library, self._offset = folder / "clock.so", folder / "clock"
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE)]
        subprocess.run(command, check=True)
        self.jump(0)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Sets the difference from the true time."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))
