"""AutoRound's configs: the packings, modules with settings of their own, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from tests.quantized_files import METHODS, auto_round, gptq, make_quantized

MODULE = "model.layers.0.self_attn.q_proj"
PARTS = ("qweight", "qzeros", "scales", "weight")
WHOLE = {"bits": 16, "data_type": "float"}


def of_module(parts: dict[str, Any]) -> dict[str, Any]:
    return {f"{MODULE}.{part}": parts.get(part) for part in PARTS}


def problems_of(path: Path, method: str, config: dict[str, Any]) -> str:
    make_quantized(path, METHODS[method], config=config)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {MODULE: {"bits": 8, "sym": False}},
        {r".*layers\.0\.self_attn\.q_proj.*": {"bits": 8, "sym": False}},
        {"q_proj|k_proj": {}, MODULE: {"bits": 8, "sym": False, "act_bits": 16}},
    ],
    ids=["name", "expression", "names go first"],
)
def test_a_module_with_settings_of_its_own(extra: dict[str, Any], tmp_path: Path) -> None:
    own = auto_round(gptq(8), "auto_round:auto_gptq").encode(np.random.default_rng(1), 64, 64)
    make_quantized(tmp_path, METHODS["auto-round"], tensors=of_module(dict(own.parts)), config={"extra_config": extra})
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read(f"{MODULE}.weight"), own.weight)


@pytest.mark.parametrize("method", ["auto-round", "auto-round-awq"])
@pytest.mark.parametrize("key", [MODULE, r".*0\.self_attn\.q_proj.*"])
def test_a_module_that_is_not_quantized(key: str, method: str, tmp_path: Path) -> None:
    config = {"extra_config": {key: WHOLE}}
    plain = np.ones((64, 64), np.float16)
    make_quantized(tmp_path, METHODS[method], tensors=of_module({"weight": plain}), config=config)
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read(f"{MODULE}.weight"), plain)
    message = problems_of(tmp_path / "quantized", method, config)
    assert f"{MODULE}: it is quantized, but the config lists it as unquantized" in message


def test_the_packing_of_a_config_that_names_none(tmp_path: Path) -> None:
    wanted = make_quantized(tmp_path, METHODS["auto-round"], config={"packing_format": None})
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read(f"{MODULE}.weight"), wanted[f"{MODULE}.weight"])


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        ("auto-round", "auto_round:gptq:exllamav2"),
        ("auto-round", "auto_round:auto_gptq:cuda"),
        ("auto-round-int8", "auto_round:tritonv2"),
        ("auto-round-awq", "auto_round:awq:gemm"),
    ],
)
def test_what_versions_before_0_5_wrote(method: str, backend: str, tmp_path: Path) -> None:
    config = {"quant_method": "intel/auto-round", "packing_format": None, "backend": backend}
    wanted = make_quantized(tmp_path, METHODS[method], config=config)
    with Checkpoint.open(tmp_path) as found:
        assert np.array_equal(found.read(f"{MODULE}.weight"), wanted[f"{MODULE}.weight"])
    message = problems_of(tmp_path / "marlin", method, config | {"backend": "auto_round:gptq:marlin"})
    assert "packing 'auto_round:gptq:marlin' is not supported; supported: auto_round:auto_gptq" in message


@pytest.mark.parametrize(
    ("method", "config", "problem"),
    [
        ("auto-round", {"packing_format": "auto_round:llm_compressor"}, "'auto_round:llm_compressor' is not supported"),
        ("auto-round", {"packing_format": ["auto_round"]}, "packing ['auto_round'] is not supported"),
        ("auto-round", {"bits": 2}, "bits 2 is not supported; supported: 4, 8"),
        ("auto-round-awq", {"bits": 8}, "bits 8 is not supported; supported: 4"),
        ("auto-round", {"data_type": "mx_fp"}, "data_type 'mx_fp' is not supported; supported: 'int'"),
        ("auto-round", {"act_bits": 8}, "act_bits 8 is not supported; supported: 16, 32"),
        ("auto-round", {"rotation_config": {"type": "hadamard"}}, "rotation_config {'type': 'hadamard'} is not"),
        ("auto-round", {"extra_config": [MODULE]}, "extra_config must be an object of objects"),
        ("auto-round", {"extra_config": {"(a+)+": {}}}, "extra_config: pattern '.*(?:(a+)+)' is too complex"),
        ("auto-round", {"extra_config": {MODULE: {"bits": 3}}}, f"extra_config '{MODULE}': bits 3 is not supported"),
        ("auto-round", {"extra_config": {MODULE: {"data_type": "fp"}}}, f"'{MODULE}': data_type 'fp' is not supported"),
        ("auto-round-awq", {"extra_config": {MODULE: {"group_size": 32}}}, "AWQ's packing must be the same for all"),
        (
            "auto-round",
            {"sym": True, "packing_format": "auto_round"},
            "sym, checkpoint_format or packing_format is wrong",
        ),
    ],
    ids=str,
)
def test_what_is_refused(method: str, config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in problems_of(tmp_path, method, config)
