"""What the compiler made of kernels before, by everything that decides its bytes.

A compilation takes half a second, and the same one gives the same bytes. One of sixteen is done again, to see that the
record is true. After a change to a kernel, or with another version of Triton, the record lacks it: AGAIN, which takes
seven minutes of a processor.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

from llmserve.builder.targets.cuda import compiler
from llmserve.builder.targets.cuda.compiler import Compiled, TritonCompiler
from llmserve.engine.cuda import kernels
from llmserve.engine.cuda.layout import Kernel

RECORD = Path(__file__).with_name("compiled_before.csv")
AGAIN = "compile all and write the record: RECORD_KERNELS=1 python -m pytest tests/engine/cuda/test_kernels.py"
FACTS = [name for name in Compiled.__dataclass_fields__ if name != "binary"]
COMPILED_ANYWAY = "0"  # what the digest of one of sixteen begins with


@cache
def digest_of_sources() -> str:
    """Of the kernels, of what they import, and of what calls the compiler."""
    files = {*Path(kernels.__file__).parent.glob("*.py")}
    modules = {name for path in files for name in re.findall(r"^from (llmserve\.\S+) import", path.read_text(), re.M)}
    specs = [find_spec(name) for name in (*modules, compiler.__name__)]  # imported they would not be interpreted
    files |= {Path(str(spec.origin)) for spec in specs if spec}
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


class CompiledBefore:
    """A `Compiler` that remembers, and compiles what it does not. What it gives has no binary."""

    version = TritonCompiler().version

    def __init__(self) -> None:
        self._is_new = bool(os.environ.get("RECORD_KERNELS"))
        self._found: dict[str, Compiled] = {}
        self._missing: set[str] = set()
        if not self._is_new:
            with RECORD.open() as file:
                self._found = {row.pop("digest"): _compiled(row) for row in csv.DictReader(file)}

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        digests = [self._digest(kernel, architecture) for kernel in kernels]
        wanted = [digest not in self._found or digest.startswith(COMPILED_ANYWAY) for digest in digests]
        missing = [kernel for kernel, is_wanted in zip(kernels, wanted, strict=True) if is_wanted]
        made = TritonCompiler().compile(missing, architecture, threads)
        for digest, is_wanted in zip(digests, wanted, strict=True):
            if is_wanted:
                one = replace(next(made), binary=b"")
                if digest not in self._found:
                    self._missing.add(digest)
                assert one == self._found.setdefault(digest, one), f"{RECORD.name} has another {digest}; {AGAIN}"
            yield self._found[digest]

    def _digest(self, kernel: Kernel, architecture: str) -> str:
        decides = repr((kernel, architecture, self.version, digest_of_sources()))
        return hashlib.sha256(decides.encode()).hexdigest()[:16]

    def close(self) -> None:
        if not self._is_new:
            assert not self._missing, f"{RECORD.name} lacks {len(self._missing)} kernels; {AGAIN}"
        else:
            with RECORD.open("w") as file:
                writer = csv.DictWriter(file, ["digest", *FACTS], lineterminator="\n", extrasaction="ignore")
                writer.writeheader()
                writer.writerows({"digest": digest, **asdict(one)} for digest, one in sorted(self._found.items()))


def _compiled(row: dict[str, str]) -> Compiled:
    types = get_type_hints(Compiled)
    return Compiled(b"", **{name: types[name](value) for name, value in row.items()})
