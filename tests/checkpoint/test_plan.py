"""The weight plan: checked both ways, all problems at once; combining, casting, and what does not fit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.checkpoint.integers import Integers, integers
from llmserve.checkpoint.plan import WeightPlan, plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.rearranged import ReorderedRows, ScaledRows
from llmserve.errors import CheckpointError
from llmserve.models.registry import architecture_for
from llmserve.models.spec import Combine, Param
from tests.checkpoints import (
    DTYPES,
    KINDS,
    generation_config,
    make_checkpoint,
    random_tensors,
    write_json,
    write_tensors,
)

Tensors = dict[str, NDArray[Any]]


def plan_for(path: Path) -> WeightPlan:
    checkpoint = Checkpoint.open(path)
    architecture = architecture_for(checkpoint.config)
    return plan_weights(checkpoint, architecture.params(architecture.from_hf(checkpoint.config)), architecture.ignored)


def edited(path: Path, kind: str, edit: Callable[[Tensors], Any]) -> Path:
    """A checkpoint of `kind` after `edit` has changed its tensors."""
    path.mkdir(exist_ok=True)
    tensors = random_tensors(KINDS[kind], dtype="float32", seed=0)
    edit(tensors)
    write_json(path / "config.json", KINDS[kind])
    write_json(path / "generation_config.json", generation_config(KINDS[kind]))
    write_tensors(path, tensors, "safetensors")
    return path


def problems_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_for(path)
    return str(caught.value)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    message = problems_of(edited(tmp_path, "mixtral", lambda tensors: tensors.pop(name)))
    assert f"tensor {name} [64, 112] is missing" in message


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("qwen3-next-moe", "2.linear_attn.A_log", [6]),
        ("qwen3-next-moe", "2.linear_attn.conv1d.weight", [168, 1, 4]),
        ("qwen3-next-moe", "2.linear_attn.in_proj_ba.weight", [12, 64]),
        ("granite4-h", "2.mamba.D", [8]),
        ("bamba", "1.self_attn.k_proj.weight", [20, 60]),
        ("falcon-h1", "0.mamba.norm.weight", [90]),
    ],
)
def test_a_tensor_of_one_kind_of_layers_that_is_missing_is_named(
    kind: str, name: str, shape: list[int], tmp_path: Path
) -> None:
    name = f"model.layers.{name}"
    message = problems_of(edited(tmp_path, kind, lambda tensors: tensors.pop(name)))
    assert f"tensor {name} {shape} is missing" in message


def test_rows_are_multiplied_with_their_factors(tmp_path: Path) -> None:
    """Integers stay integers, and their steps are multiplied."""
    stored = Integers(np.arange(12, dtype=np.int16).reshape(3, 4), np.ones((3, 1), np.float32))

    class Quantized:
        def __getitem__(self, rows: slice) -> NDArray[Any]:
            return stored.values[rows].astype(np.float32)

        def integers(self, rows: slice) -> Integers:
            return Integers(stored.values[rows], stored.steps[rows])

    scaled = ScaledRows(Quantized(), np.array([2.0, 1.0, 0.3], np.float32))
    found = integers(scaled, slice(1, 3))
    assert found is not None
    assert np.array_equal(found.values, stored.values[1:])
    assert np.array_equal(scaled[1:3], found.values * found.steps)
    assert scaled[2:3].tolist() == [[np.float32(0.3) * value for value in (8, 9, 10, 11)]]
    assert ScaledRows(np.ones(3, np.float16), scaled.factors)[:].dtype == np.float32


def test_rows_of_another_order_are_read_in_runs() -> None:
    """Where what lies between them is not wanted."""
    read: list[slice] = []

    class Source:
        def __getitem__(self, rows: slice) -> NDArray[Any]:
            read.append(rows)
            return np.arange(1000.0)[rows]

    order = np.concatenate([np.arange(10, 14), np.arange(900, 903), np.arange(20, 24)])
    rows = ReorderedRows(Source(), order)
    for wanted in (slice(None), slice(2, 6), slice(7, 9), slice(4, 5)):
        assert np.array_equal(rows[wanted], order[wanted])
    assert max(rows.stop - rows.start for rows in read) == 4


def test_experts_may_be_in_one_tensor_or_in_one_each(tmp_path: Path) -> None:
    """And a layer that drafts tokens is known, and not wanted."""

    def split(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            for expert, matrix in enumerate(tensors.pop(name)):
                prefix = f"{name.rpartition('.')[0]}.{expert}"
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
                tensors |= {f"{prefix}.{part}.weight": np.ascontiguousarray(rows) for part, rows in parts.items()}
        tensors["mtp.fc.weight"] = np.ones((2, 2), np.float32)

    together = plan_for(make_checkpoint(tmp_path / "together", "qwen3.5-moe", with_tokenizer=False))
    apart = plan_for(edited(tmp_path / "apart", "qwen3.5-moe", split))
    for part in ("gate_up", "down"):
        name = f"layers.1.mlp.experts.{part}"
        assert np.array_equal(together.load(name, "float32"), apart.load(name, "float32"))


@pytest.mark.parametrize("prefix", ["model.", "backbone."])
def test_experts_of_nemotron_may_be_in_one_tensor_or_in_one_each(prefix: str, tmp_path: Path) -> None:
    """Under transformers' names of layers, and under the published ones."""

    def stack(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            layer, _, part = name.removesuffix(".weight").partition(".experts.")
            number, module = part.split(".")
            tensors.setdefault(f"{layer}.experts.{module}", np.empty((6, *tensors[name].shape), np.float32))
            tensors[f"{layer}.experts.{module}"][int(number)] = tensors.pop(name)
        for name in list(tensors):
            tensors[name.replace("model.", prefix)] = tensors.pop(name)

    apart = plan_for(make_checkpoint(tmp_path / "apart", "nemotron-h-moe", with_tokenizer=False))
    together = plan_for(edited(tmp_path / "together", "nemotron-h-moe", stack))
    for param in apart.params:
        assert np.array_equal(together.load(param.name, "float32"), apart.load(param.name, "float32"))


def test_combining(tmp_path: Path) -> None:
    tensors = random_tensors(KINDS["qwen2"], dtype="float32", seed=0)
    plan = plan_for(make_checkpoint(tmp_path, "qwen2", with_tokenizer=False))
    layer = "model.layers.1.self_attn"
    for suffix, name in (("weight", "layers.1.attn.qkv"), ("bias", "layers.1.attn.qkv.bias")):
        stacked = np.concatenate([tensors[f"{layer}.{n}_proj.{suffix}"] for n in "qkv"])
        assert np.array_equal(plan.load(name, "float32"), stacked)
    gate, up = (tensors[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert np.array_equal(plan.load("layers.1.mlp.gate_up", "float32"), np.concatenate([gate, up]))
    assert np.array_equal(plan.load("norm", "float32"), tensors["model.norm.weight"])


@pytest.mark.parametrize("format", ["safetensors", "bin"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_param_in_every_dtype(stored: str, dtype: str, format: str, tmp_path: Path) -> None:
    plan = plan_for(make_checkpoint(tmp_path, "llama", dtype=stored, format=format, with_tokenizer=False))
    for param in plan.params:
        array = plan.load(param.name, dtype)
        assert (array.shape, array.dtype) == (param.shape, DTYPES[dtype])
        assert array.flags.c_contiguous
        exact = plan.load(param.name, "float32")
        assert np.array_equal(array, exact.astype(DTYPES[dtype]))


def test_norm_head_rows_have_length_one(tmp_path: Path) -> None:
    path = edited(tmp_path, "baichuan2-7b", lambda t: t["lm_head.weight"].__setitem__(3, 0.0))
    head = plan_for(path).load("head", "float32")
    norms = np.linalg.norm(head.astype(np.float64), axis=1)
    assert norms[3] == 0.0  # a zero row stays zero, as in torch
    assert np.delete(norms, 3) == pytest.approx(1.0, abs=1e-6)
    original = random_tensors(KINDS["baichuan2-7b"], dtype="float32", seed=0)["lm_head.weight"]
    assert head[5] == pytest.approx(original[5] / np.linalg.norm(original[5]), rel=1e-6)
    assert np.array_equal(plan_for(path).load("head", "float16"), head.astype(np.float16))


def test_a_strided_view_is_loaded_contiguous(tmp_path: Path) -> None:
    import torch

    make_checkpoint(tmp_path, "llama", format="bin", with_tokenizer=False)
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = tensors[name].numpy().copy()
    tensors[name] = tensors[name].t().contiguous().t()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = plan_for(tmp_path).load("layers.0.mlp.down", "float32")
    assert found.flags.c_contiguous
    assert np.array_equal(found, wanted)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        del tensors["model.norm.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:100].copy()
        tensors["model.embed_tokens.weight"] = np.zeros((320, 64), np.int8)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((176, 64), np.float32)

    message = problems_of(edited(tmp_path, "llama", edit))
    assert "(4 problems)" in message
    for problem in (
        "tensor model.norm.weight [64] is missing",
        "tensor lm_head.weight has shape [100, 64], config.json requires [320, 64]",
        "tensor model.embed_tokens.weight has dtype int8; supported: float64, float32, float16, bfloat16",
        "tensor model.layers.2.mlp.up_proj.weight is not part of this architecture",
    ):
        assert problem in message


def test_a_folder_of_another_architecture_does_not_flood(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=12, with_tokenizer=False)
    write_json(tmp_path / "config.json", KINDS["baichuan2-7b"])
    message = problems_of(tmp_path)
    assert len(message.splitlines()) == 42
    assert message.splitlines()[-1].strip().startswith("- ... and ")


def test_ignored_tensors(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    assert plan_for(edited(tmp_path / "llama", "llama", edit)).params
    masks = {f"gpt_neox.layers.0.attention.{name}": np.ones(4, np.float32) for name in ("bias", "masked_bias")}
    assert plan_for(edited(tmp_path / "pythia", "gpt-neox", lambda tensors: tensors.update(masks))).params
    edited(tmp_path / "b", "baichuan2-13b", lambda t: t.update({"model.alibi_mask": np.ones((6, 4, 4), np.float32)}))
    assert plan_for(tmp_path / "b").params
    edited(tmp_path / "c", "llama", lambda t: t.update({"model.alibi_mask": np.ones(4, np.float32)}))
    assert "model.alibi_mask is not part" in problems_of(tmp_path / "c")


def test_overflow_names_the_tensor_and_the_way_out(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    plan = plan_for(edited(tmp_path, "llama", lambda t: t[name].__setitem__((3, 5), 1e6)))
    with pytest.raises(CheckpointError, match=f"tensor {name} does not fit float16 .* --dtype bfloat16"):
        plan.load("layers.1.attn.qkv", "float16")
    assert plan.load("layers.1.attn.qkv", "bfloat16").astype(np.float32).max() == pytest.approx(1e6, rel=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none(value: float, tmp_path: Path) -> None:
    plan = plan_for(edited(tmp_path, "llama", lambda t: t["lm_head.weight"].__setitem__((3, 5), value)))
    for dtype in ("float32", "float16"):
        with pytest.raises(CheckpointError, match=r"tensor lm_head.weight has NaN or infinite values"):
            plan.load("head", dtype)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path: Path) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def differ(tensors: Tensors) -> None:
        repeat(tensors)
        tensors["lm_head.weight"][7, 7] += 1.0

    same = plan_for(edited(tmp_path / "same", "llama-tied", repeat))
    assert np.array_equal(same.load("head", "float16"), same.load("embed", "float16"))
    other = plan_for(edited(tmp_path / "other", "llama-tied", differ))
    with pytest.raises(CheckpointError, match='set "tie_word_embeddings": false'):
        other.load("head", "float32")
    cut = edited(tmp_path / "cut", "llama-tied", lambda t: t.update({"lm_head.weight": np.zeros((3, 64), np.float32)}))
    assert "tensor lm_head.weight has shape [3, 64]" in problems_of(cut)


def loaded(folder: Path) -> tuple[tuple[int, ...], int]:
    """The shape of what is read in this process, and the most bytes that were held at once."""
    shape = (2048, 2048)
    param = Param("ab", (4096, 2048), ("a", "b"), (shape, shape), Combine.CONCAT_ROWS)
    with Checkpoint.open(folder) as checkpoint:
        plan = plan_weights(checkpoint, [param], ())
        tracemalloc.start()
        result = plan.load("ab", "float16")
        return result.shape, tracemalloc.get_traced_memory()[1]


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_memory_stays_near_one_tensor(format: str, tmp_path: Path) -> None:
    """A parameter of two 16 MiB sources, cast to half: 16 MiB of result, one source, small temporaries."""
    tensors = {name: np.ones((2048, 2048), np.float32) for name in ("a", "b")}
    write_json(tmp_path / "config.json", {})
    write_tensors(tmp_path, tensors, format)
    # in a process of its own: what other tests left running here would be counted
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        shape, peak = pool.submit(loaded, tmp_path).result()
    assert shape == (4096, 2048)
    assert peak < 40 * 2**20
