"""Engines that keep the blocks of a GGUF file: the same numbers, as large as the file, bad files refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import round_weight
from llmserve.builder.resolve import resolve
from llmserve.checkpoint.gguf.block_types import TYPES
from llmserve.checkpoint.reader import Checkpoint
from llmserve.engine.cpu.layout import HEADER, OP, read_linear_layers
from llmserve.engine.cpu.op_codes import Blocks, OpCode
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.engine.cpu.tactics import ROW_BUCKETS, tactic_table, this_machine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.selftest import prompt_logits
from llmserve.errors import CheckpointError, EngineFileError, InvalidArgument, RecipeError
from llmserve.models.number_formats import BLOCKS, WeightFormat
from tests.builder.test_build import RecordedProgress
from tests.builder.test_cpu_engine import verified
from tests.checkpoints import make_checkpoint
from tests.engine.cpu.law import law
from tests.engine.cpu.test_engine_file import open_natively, sealed
from tests.gguf_files import make_gguf

OPTIONS = BuildOptions(quantization="gguf", max_seq_len=96, max_num_tokens=96, max_batch_size=8, tokens_per_block=4)
WIDTHS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
MIXED = (  # in turn: queries, keys and values differ
    "Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_1", "Q5_K", "Q4_0", "Q5_1", "Q3_K", "IQ4_NL", "Q2_K", "IQ4_XS", "MXFP4",
)  # fmt: skip
KINDS = [*((kind, "llama") for kind in (*BLOCKS, "Q8_0")), (MIXED, "llama"), (MIXED, "llama-tied"), (MIXED, "qwen2")]


def ids(case: object) -> str:
    return "mixed" if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize(("stored", "kind"), KINDS, ids=ids)
def test_an_engine_has_the_numbers_of_the_file(stored: str, kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys come in another order, and matrices stand side by side: every number is the same."""
    file = make_gguf(tmp_path / "m.gguf", kind, stored=stored, **WIDTHS)
    with Checkpoint.open(file) as checkpoint:
        build = resolve(checkpoint, OPTIONS)
        assert set(build.kept) == set(build.quantized) >= {"embed", "layers.0.attn.qkv", "layers.0.mlp.down"}
        for name, parts in build.quantized.items():
            expanded = build.weights.rows(name, "float32")
            rows = slice(3, expanded.shape[0] - 1)
            np.testing.assert_array_equal(round_weight(parts, expanded, rows), expanded[rows])
    for cache in ("auto", "int8"):  # queries and keys are equalized for the second: their rows have factors
        build_engine(file, tmp_path / cache, replace(OPTIONS, kv_cache_dtype=cache))
        assert verified(EngineDirectory.open(tmp_path / cache)).passed


def test_progress_counts_kept_numbers_as_they_are_hashed(tmp_path: Path) -> None:
    """In float32, whatever the engine's dtype is."""
    file = make_gguf(tmp_path / "m.gguf", "llama", stored="Q4_K", **WIDTHS)
    progress = RecordedProgress()
    build_engine(file, tmp_path / "engine", OPTIONS, progress=progress)
    [total] = [total for name, total in progress.phases if name == "hash the checkpoint"]
    assert progress.done["hash the checkpoint"] == total


@pytest.mark.parametrize("kind", [*BLOCKS, "Q8_0"])
def test_expanded_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    rng = np.random.default_rng(7)
    block = next(each for each in TYPES.values() if each.name == kind)
    stored = gguf.GGMLQuantizationType[kind]
    raw = rng.integers(0, 256, (40, block.num_bytes), dtype=np.uint8)
    for field in ("d", "m", "dmin"):
        if field in (block.layout.names or ()):
            at = block.layout.fields[field][1]  # type: ignore[index]
            raw[:, at : at + 2] = rng.uniform(-1, 1, (40, 1)).astype(np.float16).view(np.uint8)
    assert block.expand is not None
    np.testing.assert_array_equal(block.expand(raw.reshape(-1).view(block.layout)), gguf.quants.dequantize(raw, stored))


def test_an_engine_is_about_as_large_as_its_file(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", "llama-tied", stored="Q4_K", hidden_size=512, intermediate_size=1024)
    build_engine(file, tmp_path / "engine", OPTIONS)
    engine = EngineDirectory.open(tmp_path / "engine").engine_file
    assert engine.stat().st_size < 1.05 * file.stat().st_size + 100 * 4096  # each tensor begins a page


@pytest.mark.parametrize("code", [OpCode.EMBED, OpCode.LINEAR_BLOCKS])
def test_blocks_of_another_kind_are_a_damaged_file(code: OpCode, tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored="Q4_K", **WIDTHS)
    build_engine(file, tmp_path / "engine", OPTIONS)
    path = EngineDirectory.open(tmp_path / "engine").engine_file
    good = path.read_bytes()
    header = np.frombuffer(good, HEADER, 1)[0]
    begin = int(header["ops_offset"])
    ops = np.frombuffer(good, OP, int(header["num_ops"]), begin).copy()
    index = int(np.flatnonzero(ops["kind"] == code)[0])
    for blocks in (Blocks.SCALE, Blocks.SCALE_AND_MINIMUM, Blocks.HALF_SCALES, len(Blocks), 2**31):
        ops["groups"][index] = blocks
        path.write_bytes(sealed(bytearray(good[:begin] + ops.tobytes() + good[begin + ops.nbytes :])))
        with pytest.raises(EngineFileError, match=f"damaged record of operation {index}$"):
            open_natively(path)


def test_a_table_with_an_unknown_tactic_is_refused(tmp_path: Path) -> None:
    build_engine(make_gguf(tmp_path / "m.gguf", stored="Q4_K", **WIDTHS), tmp_path / "engine", OPTIONS)
    path = EngineDirectory.open(tmp_path / "engine").engine_file
    table = bytearray(tactic_table(path, this_machine()))
    table[min(read_linear_layers(path)[1]) * len(ROW_BUCKETS)] = 200
    with pytest.raises(InvalidArgument, match="has no tactic 200"):
        CpuRunner.open(path, num_blocks=90).set_tactics(bytes(table))


@pytest.mark.parametrize("isa", available_isas())
def test_blocks_obey_the_law(isa: str, tmp_path: Path) -> None:
    """And every instruction set agrees with the portable one."""
    file = make_gguf(tmp_path / "m.gguf", stored=MIXED, **WIDTHS)
    build_engine(file, tmp_path / "engine", OPTIONS)
    path = EngineDirectory.open(tmp_path / "engine").engine_file
    runners = [CpuRunner.open(path, isa=isa, threads=threads, num_blocks=90) for threads in (1, 2)]
    portable = CpuRunner.open(path, isa="portable", num_blocks=90)
    prompt = [token * 37 % 250 for token in range(60)]
    wanted, found = (prompt_logits(runner, prompt, sequence_id=0) for runner in (portable, runners[0]))
    errors = np.abs(found - wanted) / np.abs(wanted).max()
    assert errors[0].max() < 1e-5
    assert errors.max() < 0.05, "a last bit tips an activation over, and that grows"
    law(runners[0], lambda rng: rng.choice(runners))
    for runner in (*runners, portable):
        runner.close()


def test_types_are_part_of_the_digest(tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored=MIXED, **WIDTHS)
    kept = build_engine(file, tmp_path / "kept", OPTIONS)
    rounded = build_engine(file, tmp_path / "rounded", replace(OPTIONS, quantization="int8"))
    assert kept.engine_digest != rounded.engine_digest
    assert kept.device["kept_params"] == kept.device["quantized_params"]
    assert kept.device["operations"]["linear_blocks"] > kept.device["operations"]["linear_int8"]


def test_what_has_no_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="keeps blocks of a GGUF file, but tiny has none"):
        build_engine(make_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "engine", OPTIONS)


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1", "Q6_K"])
def test_a_scale_that_is_no_number_is_refused(kind: str, tmp_path: Path) -> None:
    file = make_gguf(tmp_path / "m.gguf", stored=kind, **WIDTHS)
    reader = gguf.GGUFReader(file)
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    damaged = bytearray(file.read_bytes())
    place = int(tensor.data_offset) + (208 if kind == "Q6_K" else 0)
    damaged[place : place + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_down\.weight has NaN or infinite values"):
        build_engine(file, tmp_path / "engine", OPTIONS)
    assert not (tmp_path / "engine").exists()


def test_experts_of_several_types_are_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 64}
    file = make_gguf(tmp_path / "m.gguf", "olmoe", stored=("Q8_0", "Q4_0", "Q5_0"), **sizes)
    with pytest.raises(RecipeError, match="have several types"):
        build_engine(file, tmp_path / "engine", OPTIONS)


@pytest.mark.parametrize(
    ("kind", "stored", "format"),
    [
        ("gpt-oss", "MXFP4", BLOCKS["MXFP4"]),
        ("gpt-oss", "Q5_1", BLOCKS["Q5_1"]),
        ("granite-moe", "Q4_0", BLOCKS["Q4_0"]),
        ("granite-moe", "Q4_K", BLOCKS["Q4_K"]),
    ],
)
def test_gates_and_ups_keep_the_blocks_that_they_have_apart(
    kind: str, stored: str, format: WeightFormat, tmp_path: Path
) -> None:
    """In a file they are two tensors, in a checkpoint one."""
    file = make_gguf(tmp_path / "m.gguf", kind, stored=stored, hidden_size=256, intermediate_size=256)
    with Checkpoint.open(file) as checkpoint:
        build = resolve(checkpoint, OPTIONS)
        for name in ("gate_up", "down"):
            [part] = build.quantized[f"layers.1.mlp.experts.{name}"]
            assert part.scheme.format is format
            expanded = build.weights.rows(f"layers.1.mlp.experts.{name}", "float32")
            rows = slice(250, expanded.shape[0] - 1)
            np.testing.assert_array_equal(round_weight([part], expanded, rows), expanded[rows])
    build_engine(file, tmp_path / "engine", OPTIONS)
    assert verified(EngineDirectory.open(tmp_path / "engine")).passed


@pytest.mark.parametrize(
    ("kind", "floats"),
    [
        # value heads in another order, of which two or more are a block
        ("qwen3.5", {"layers.0.attn.output", "layers.2.attn.output"}),
        ("granite4-h-moe", set()),
        ("gemma3n", set()),
        ("gemma4", set()),
        ("nemotron-h-moe", set()),
    ],
)
def test_networks_with_states_keep_blocks(kind: str, floats: set[str], tmp_path: Path) -> None:
    sizes = WIDTHS | {"mamba_n_heads": 16, "mamba_d_head": 32, "shared_intermediate_size": 256}
    sizes |= {
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 32,
        "head_dim": 64,
        "global_head_dim": 128,
        "laurel_rank": 256,
    }
    if kind == "nemotron-h-moe":
        sizes |= {"mamba_num_heads": 8, "mamba_head_dim": 32, "hybrid_override_pattern": "ME*ME", "n_groups": 1}
        sizes |= {"moe_intermediate_size": 256, "moe_shared_expert_intermediate_size": 256}
    file = make_gguf(tmp_path / "m.gguf", kind, stored="Q4_K", hidden_size_per_layer_input=256, **sizes)
    with Checkpoint.open(file) as checkpoint:
        build = resolve(checkpoint, OPTIONS)
        names = {param.name for param in build.weights.params if param.quantizable}
        assert names - set(build.kept) == floats
    build_engine(file, tmp_path / "engine", OPTIONS)
    assert verified(EngineDirectory.open(tmp_path / "engine")).passed
