"""Modules as the real programs wrote them (`record.py`): the weights that those programs make of them, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from llmserve.checkpoint.formats.base import Module, ModuleCheck, StoredWeight
from llmserve.checkpoint.formats.config import METHODS
from llmserve.checkpoint.formats.fp4 import fp4_weight
from llmserve.checkpoint.safetensors_file import SafetensorsFile
from llmserve.checkpoint.stored_tensor import Tensor, TensorInfo
from llmserve.models.config import ConfigReader

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.safetensors"))
LINEAR = [path for path in RECORDED if path.stem != "mxfp4-experts"]


def open_recorded(path: Path) -> tuple[StoredWeight, Tensor]:
    file = SafetensorsFile(path)
    with safe_open(path, framework="numpy") as opened:
        config: dict[str, Any] = json.loads(opened.metadata()["config"])
    parts = {name: info for name, info in file.tensors.items() if name != "expected"}
    reader = ConfigReader(config)
    found = METHODS[config["quant_method"]](reader)
    problems = reader.problems
    weight = found.weight(Module("m", parts, file.read), problems)
    assert problems == []
    assert weight is not None
    assert {weight.main, *weight.others} == parts.keys()
    return weight, file.read("expected")


def test_the_experts_of_gpt_oss_are_packed_likewise() -> None:
    file = SafetensorsFile(RECORDED[0].with_name("mxfp4-experts.safetensors"))
    parts = {
        "weight_packed": file.read("blocks")[0].reshape(32, 32),
        "weight_scale": np.ascontiguousarray(file.read("scales")[0]),
    }
    infos = {name: TensorInfo("uint8", values.shape, values.nbytes) for name, values in parts.items()}
    module = Module("m", infos, parts.__getitem__)
    weight = fp4_weight(module, ModuleCheck(module, []), is_nvidia=False)
    assert weight is not None
    assert np.array_equal(weight.expand()[:], file.read("expected"))


@pytest.mark.parametrize("path", LINEAR, ids=lambda path: path.stem)
def test_the_weight_is_the_programs_own(path: Path) -> None:
    weight, expected = open_recorded(path)
    assert weight.shape == expected.shape
    rows = weight.expand()
    found = rows[:]
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    for start, stop in ((0, 1), (3, 21), (31, 32), (8, 8)):
        assert np.array_equal(rows[start:stop], expected[start:stop])
