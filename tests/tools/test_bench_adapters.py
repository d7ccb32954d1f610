"""What `make bench-adapters` measures: steps with the adapters that it writes, beside those without."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from tools.bench_adapters import CASES, RANK, costs, load_adapters, write_adapter
from tools.benchmark import ours
from tools.benchmark.cells import measure_cell, random_prompts
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import OURS_MODULE
from tools.benchmark.job import Job
from tools.benchmark.peers.gguf_file import write_adapter_gguf
from tools.benchmark.shapes import SHAPES

TINY = SHAPES["tiny"]


def test_llama_cpp_gets_the_same_adapter(tmp_path: Path) -> None:
    """Rows of queries and keys in its order; the rest as it is."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint-tiny", TINY)
    adapter = write_adapter(tmp_path / "peft", TINY, checkpoint, 1)
    write_adapter_gguf(adapter, tmp_path / "adapter.gguf")
    file = gguf.GGUFReader(tmp_path / "adapter.gguf")
    alpha = file.get_field("adapter.lora.alpha")
    assert alpha is not None
    assert alpha.contents() == RANK
    found = {tensor.name: tensor.data for tensor in file.tensors}
    assert len(found) == 2 * 7 * TINY.layers
    with safe_open(adapter / "adapter_model.safetensors", framework="numpy") as tensors:
        layer = "base_model.model.model.layers.1"
        for name, of_peft in (("ffn_down", "mlp.down_proj"), ("attn_q", "self_attn.q_proj")):
            down, up = (tensors.get_tensor(f"{layer}.{of_peft}.lora_{which}.weight") for which in "AB")
            if name == "attn_q":
                up = up.reshape(TINY.heads, 2, -1, RANK).swapaxes(1, 2).reshape(up.shape)
            np.testing.assert_array_equal(found[f"blk.1.{name}.weight.lora_a"], down)
            np.testing.assert_array_equal(found[f"blk.1.{name}.weight.lora_b"], up)


def test_adapters_change_answers_and_cost_something(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint-tiny", TINY)
    row = costs(TINY, "int8", tmp_path, threads=1, rounds=2)
    assert row[0] == "int8"
    assert all(re.fullmatch(r"[+-][\d.]+ % \([+-][\d.]+ to [+-][\d.]+\)", cell) for cell in row[1:])
    assert len(row) == 1 + len(CASES)
    (_, cell), _ = CASES
    job = Job(OURS_MODULE, "int8", TINY.name, tmp_path, 1, (cell,))
    directory = EngineDirectory.open(ours.engine_directory(job))
    runner = CpuRunner.open(directory.engine_file, num_blocks=8, threads=1)
    load_adapters(runner, directory.path, TINY, job.checkpoint, tmp_path, 1)
    prompts = random_prompts(cell, TINY.vocab, 0)
    plan = ours.build_plan(job)
    base, adapted = (
        measure_cell(ours.RunnerModel(runner, plan, {}, adapters=slots), cell, prompts, max_seconds=60).ids
        for slots in ((), (1,))
    )
    assert base != adapted
    runner.close()
