"""What is in the wheels, and what it asks of the machine."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from llmserve.engine.native.library import Library, available_isas
from tests.wheels.conftest import LIBRARY

ELFFile: Any = pytest.importorskip("elftools.elf.elffile", reason="`make wheels` installs pyelftools").ELFFile
ROOT = Path(__file__).resolve().parents[2]
GLIBC = (2, 28)
SYSTEM = re.compile(
    r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d"
)  # glibc: every Linux that pip knows has it
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


def tracked(*patterns: str) -> set[str]:
    command = ["git", "ls-files", *patterns]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def needed_versions(elf: Any) -> dict[str, set[str]]:
    """Library -> versions of its symbols."""
    section = elf.get_section_by_name(".gnu.version_r")
    return {library.name: {version.name for version in versions} for library, versions in section.iter_versions()}


def test_the_name_says_for_what_it_is(wheels: dict[str, Path], processor: str) -> None:
    tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
    assert wheels[processor].name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(wheels[processor]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
        text = wheel.read(name).decode()
    assert re.findall(r"^(?:Tag|Root-Is-Purelib): (.*)$", text, re.MULTILINE) == ["false", tag]


def test_it_has_every_file_of_the_package_and_no_source_of_the_kernels(wheels: dict[str, Path], processor: str) -> None:
    with zipfile.ZipFile(wheels[processor]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        sources = {name: (ROOT / name).read_bytes() for name in tracked("llmserve") if "/kernels/" not in name}
        assert {name: wheel.read(name) for name in sources} == sources
    pipelines = {f"llmserve/_data/{name}" for name in tracked("pipelines*/**") if not name.endswith(".gitkeep")}
    assert pipelines <= names
    assert {name for name in names - set(sources) if not name.startswith("llmserve/_data/pipelines")} == {LIBRARY}


def test_the_library_needs_an_old_glibc_and_nothing_else(library: Path, processor: str) -> None:
    with library.open("rb") as file:
        elf = ELFFile(file)
        assert elf["e_machine"] == MACHINES[processor]
        needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
        assert [name for name in needed if not SYSTEM.fullmatch(name)] == []
        versions = {version for names in needed_versions(elf).values() for version in names}
        symbols = elf.get_section_by_name(".dynsym").iter_symbols()
        exported = {
            symbol.name
            for symbol in symbols
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
        }
    found = [tuple(int(part) for part in version.removeprefix("GLIBC_").split(".")) for version in versions]
    assert max(found) <= GLIBC
    assert exported, "ctypes finds what is exported"
    assert {name for name in exported if not name.startswith("llmserve_")} == set()


def test_auditwheel_agrees(wheels: dict[str, Path], processor: str) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", str(wheels[processor])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    fits = re.search(rf"manylinux_(\d+)_(\d+)_{processor}", " ".join(done.stdout.split()).partition("following")[2])
    assert fits is not None, done.stdout
    assert (int(fits[1]), int(fits[2])) <= GLIBC


def test_it_has_the_instruction_sets_of_a_compiled_installation(wheels: dict[str, Path], library: Path) -> None:
    """Those that this processor runs; of the others, that they were compiled (their tables have names)."""
    names = {"EM_X86_64": ("avx2", "avx2_vnni", "avx512"), "EM_AARCH64": ("neon",)}
    with library.open("rb") as file:
        machine = ELFFile(file)["e_machine"]
    blob = library.read_bytes()
    assert [name for name in ("portable", *names[machine]) if f"\0{name}\0".encode() not in blob] == []
    if machine != MACHINES[platform.machine()]:
        pytest.skip("the rest is for a processor of that kind")
    assert Library(library).variants() == available_isas()
