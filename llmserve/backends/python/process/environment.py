"""A model's own Python environment (`EXECUTION_ENV_PATH`): a folder, or an archive as conda-pack makes them.

The model's process runs the environment's interpreter, which must be of the server's version. The process uses packages
that the environment lacks, such as numpy, from the server's environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import llmserve
from llmserve.errors import ModelConfigError
from llmserve.owned_directory import new_temporary_directory

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
# runs a module; the paths after its first argument are appended to sys.path
RUN = (
    "import runpy, sys; sys.path += sys.argv[3:]; del sys.argv[3:]; "
    "runpy.run_module(sys.argv.pop(1), alter_sys=True, run_name='__main__')"
)
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Environment:
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def command(self, module: str, argument: str) -> list[str]:
        """The command that runs `python -m module argument` there."""
        package = str(Path(llmserve.__file__).parents[1])
        paths = dict.fromkeys([package, *(path for path in sys.path if path)])
        return [str(self.python), "-P", "-u", "-c", RUN, module, argument, *paths]

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """Environment variables as in an activated environment."""
        libraries = [str(self.folder / "lib"), given.get("LD_LIBRARY_PATH", "")]
        own = {
            "PATH": os.pathsep.join([str(self.folder / "bin"), given.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "CONDA_PREFIX": str(self.folder),
        }
        return {name: value for name, value in {**given, **own}.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


class Environments:
    """The environments of one server's models. An archive is unpacked once, until the server ends."""

    def __init__(self) -> None:
        self._unpacked: dict[tuple[Path, int, int], Path] = {}
        self._lock = threading.Lock()

    def open(self, path: Path) -> Environment:
        """Raises `ModelConfigError`."""
        if not path.exists():
            raise ModelConfigError(f"EXECUTION_ENV_PATH {path} does not exist")
        environment = Environment(path if path.is_dir() else self._unpack(path))
        version = _output(path, str(environment.python), "-c", ASK_VERSION)
        if version != VERSION:
            raise ModelConfigError(
                f"EXECUTION_ENV_PATH {path} is an environment of Python {version}; the server's Python is {VERSION}, "
                "and both must be the same"
            )
        return environment

    def _unpack(self, path: Path) -> Path:
        status = path.stat()
        key = path.resolve(), status.st_mtime_ns, status.st_size
        with self._lock:
            if key not in self._unpacked:
                folder = new_temporary_directory("llmserve-environment-").path  # until the process ends
                try:
                    with tarfile.open(path) as archive:
                        archive.extractall(folder, filter="tar")
                except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
                    raise ModelConfigError(f"EXECUTION_ENV_PATH {path} cannot be unpacked: {error}") from error
                if (folder / "bin/conda-unpack").exists():  # writes the new place into its files
                    _output(path, str(folder / "bin/python"), str(folder / "bin/conda-unpack"))
                self._unpacked[key] = folder
            return self._unpacked[key]


def _output(path: Path, *command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise ModelConfigError(f"EXECUTION_ENV_PATH {path} is not a usable environment: {error}") from error
    return done.stdout.strip()
