"""A file of compiled kernels, without weights: `build --kernels-only FILE` writes it, and `--kernels FILE` uses it
instead of a compiler.

A zip archive: kernels.json describes the source of each kernel and the facts about its binaries; ARCHITECTURE/N.cubin
is the binary of kernel N. The same kernels and compiler produce the same bytes.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from llmserve.builder.targets.cuda.compiler import Compiled
from llmserve.engine.cuda.layout import Kernel, kernel_of
from llmserve.errors import InvalidArgument, RecipeError

FORMAT_VERSION = 1
INDEX = "kernels.json"
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest time that an archive can store
MOST_INDEX_BYTES, MOST_BINARY_BYTES = 1 << 28, 1 << 26
NUM_NAMED = 3
DAMAGES = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, EOFError,
           zipfile.BadZipFile, zlib.error)  # fmt: skip


class KernelIndex(NamedTuple):
    compiler: str
    numbers: Mapping[Kernel, int]
    facts: Mapping[str, Sequence[Mapping[str, Any]]]  # architecture -> each kernel's `Compiled` without the binary


def write_kernels(
    path: Path, compiler: str, kernels: Sequence[Kernel], compiled: Mapping[str, Sequence[Compiled]]
) -> None:
    """`compiled`: by architecture, in the order of `kernels`. An existing file is replaced atomically."""
    facts = {name: [_facts(each) for each in found] for name, found in compiled.items()}
    index = {
        "format_version": FORMAT_VERSION,
        "compiler": compiler,
        "kernels": list(map(asdict, kernels)),
        "facts": facts,
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
            _add(archive, INDEX, json.dumps(index, sort_keys=True).encode())
            for name, found in compiled.items():
                for number, each in enumerate(found):
                    _add(archive, _member(name, number), each.binary)
        os.replace(aside, path)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


class StoredKernels:
    """A `Compiler` that reads its results from a file. Raises RecipeError if the file is not usable."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def version(self) -> str:
        return self._index.compiler

    def problem(self, kernels: Sequence[Kernel], architecture: str) -> str:
        """Why it cannot provide these kernels; empty if it can."""
        index = self._index
        count = len(index.facts.get(architecture, ()))
        missing = [kernel.function for kernel in kernels if index.numbers.get(kernel, count) >= count]
        if not missing:
            return ""
        named = ", ".join(dict.fromkeys(missing[:NUM_NAMED])) + (" ..." if len(missing) > NUM_NAMED else "")
        return (
            f"{self._path} lacks {len(missing)} of {len(kernels)} kernels for {architecture} ({named}); it has kernels "
            f"for {', '.join(index.facts)}; rebuild it with --kernels-only and the same config and options"
        )

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        if problem := self.problem(kernels, architecture):
            raise RecipeError(problem)
        numbers, facts = self._index.numbers, self._index.facts[architecture]
        try:
            with zipfile.ZipFile(self._path) as archive:
                for kernel in kernels:
                    number = numbers[kernel]
                    binary = _content(archive, _member(architecture, number), MOST_BINARY_BYTES)
                    yield Compiled(binary=binary, **facts[number])
        except DAMAGES as error:
            raise self._damage(error) from error

    @cached_property
    def _index(self) -> KernelIndex:
        try:
            with zipfile.ZipFile(self._path) as archive:
                fields = json.loads(_content(archive, INDEX, MOST_INDEX_BYTES))
            if fields["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {fields['format_version']}, but this llmserve reads {FORMAT_VERSION}")
            numbers = {kernel_of(kernel): number for number, kernel in enumerate(fields["kernels"])}
            facts = {name: [_checked(each) for each in found] for name, found in fields["facts"].items()}
            return KernelIndex(str(fields["compiler"]), numbers, facts)
        except DAMAGES as error:
            raise self._damage(error) from error

    def _damage(self, error: Exception) -> RecipeError:
        return RecipeError(
            f"{self._path} is not a kernel file, or is damaged ({error}); rebuild it with --kernels-only"
        )


def _facts(compiled: Compiled) -> dict[str, Any]:
    fields = asdict(replace(compiled, binary=b""))
    del fields["binary"]
    return fields


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts for an engine's header, which is fully checked when it is read."""
    return _facts(Compiled(binary=b"", **facts))


def _member(architecture: str, number: int) -> str:
    return f"{architecture}/{number}.cubin"


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, LONG_AGO)
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, content)


def _content(archive: zipfile.ZipFile, name: str, most_bytes: int) -> bytes:
    if archive.getinfo(name).file_size > most_bytes:
        raise ValueError(f"{name} has more than {most_bytes} bytes")
    return archive.read(name)
