"""Operations of the engine's library: its list and Python's are one, and none can be taken for another."""

from __future__ import annotations

import re
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest

from llmserve.engine.cpu.layout import HEADER, OP
from llmserve.engine.cpu.op_codes import Before, Blocks, OpCode, RowsOf
from llmserve.errors import EngineFileError
from tests.engine.cpu.conftest import EngineFile
from tests.engine.cpu.test_engine_file import open_natively, sealed

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "llmserve/engine/cpu/kernels"
LISTS = {"OpKind": OpCode, "Before": Before}
NUMBERS = LISTS | {"RowsOf": RowsOf, "Blocks": Blocks}


def enumerators(name: str) -> list[str]:
    """Of an enum class of format.h, as Python spells them."""
    found = re.search(rf"enum class {name} : uint32_t {{\n(.*?)\n}};", (KERNELS / "format.h").read_text(), re.DOTALL)
    assert found is not None
    return [
        re.sub(r"(?<!^)([A-Z])", r"_\1", word).upper() for word in re.findall(r"^  k(\w+),", found[1], re.MULTILINE)
    ]


@pytest.mark.parametrize("name", NUMBERS)
def test_both_sides_have_the_same_numbers(name: str) -> None:
    assert {word: number for number, word in enumerate(enumerators(name))} == dict(NUMBERS[name].__members__)


@pytest.mark.parametrize("beyond", [0, 1, 2**31])
@pytest.mark.parametrize(("field", "names"), [("kind", OpCode), ("before", Before)])
def test_a_number_that_names_nothing_is_refused(
    field: str, names: type[IntEnum], beyond: int, tmp_path: Path, engine_file: EngineFile
) -> None:
    good = engine_file("rope", "float16", "int8").read_bytes()
    header = np.frombuffer(good, HEADER, 1)[0]
    begin, count = int(header["ops_offset"]), int(header["num_ops"])
    ops = np.frombuffer(good, OP, count, begin).copy()
    index = int(np.flatnonzero(ops["kind"] == OpCode.QUANTIZE)[0])
    ops[field][index] = len(names) + beyond
    path = tmp_path / "later.engine"
    path.write_bytes(sealed(bytearray(good[:begin] + ops.tobytes() + good[begin + ops.nbytes :])))
    with pytest.raises(EngineFileError, match=f"damaged record of operation {index}$"):
        open_natively(path)


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler here")
@pytest.mark.parametrize("source", ["executor.cpp", "program_check.cpp"])
def test_an_operation_that_is_left_out_does_not_compile(source: str, tmp_path: Path) -> None:
    """One that is added to each list, and nowhere else."""
    folder = shutil.copytree(KERNELS, tmp_path / "kernels")
    text = (folder / "format.h").read_text()
    text, count = re.subn(r"^(enum class (OpKind|Before) .*)$", r"\1 kLater,", text, flags=re.MULTILINE)
    assert count == len(LISTS)
    (folder / "format.h").write_text(text)
    flags = re.search(r"set\(common_flags (.*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert flags is not None
    command = ["c++", "-std=gnu++20", "-fsyntax-only", *flags[1].split(), folder / source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.returncode != 0
    assert len(errors) >= len(LISTS)
    assert all("kLater" in line for line in errors), done.stderr
