"""What `make bench-adapters` measures: steps with the adapters that it writes, beside those without."""

from __future__ import annotations

import re
from pathlib import Path

from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.directory.artifact import EngineDirectory
from tools.bench_adapters import CASES, costs, load_adapters
from tools.benchmark import ours
from tools.benchmark.cells import measure_cell, random_prompts
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import OURS_MODULE
from tools.benchmark.job import Job
from tools.benchmark.shapes import SHAPES

TINY = SHAPES["tiny"]


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
    load_adapters(runner, directory.path, TINY, tmp_path, 1)
    prompts = random_prompts(cell, TINY.vocab, 0)
    plan = ours.build_plan(job)
    base, adapted = (
        measure_cell(ours.RunnerModel(runner, plan, {}, adapters=slots), cell, prompts, max_seconds=60).ids
        for slots in ((), (1,))
    )
    assert base != adapted
    runner.close()
