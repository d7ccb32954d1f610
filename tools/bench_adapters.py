"""Measures the cost of adapters: the same steps with and without them, in turn, in one run. `make bench-adapters`.

`--peers` also measures one adapter at batch 1 in llama.cpp and OpenVINO GenAI, which use the same adapters for all
sequences of a batch.

The adapters are random, of rank 16, for every linear layer of a network: one at batch 1, eight at batch 16. Sequences
with the same adapter are adjacent, as the scheduler arranges them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors.numpy import save_file

from llmserve.builder.adapter import build_adapter
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.cpu.runner import CpuRunner, read_header
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.machine.cores import usable_cores
from llmserve.engine.machine.description import machine_name
from tools.benchmark import ours
from tools.benchmark.cells import Cell, measure_cell, random_prompts, warm_up
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import OURS_MODULE, PEERS
from tools.benchmark.environment import Environment, groups_of
from tools.benchmark.job import Job
from tools.benchmark.markdown import table
from tools.benchmark.options import say
from tools.benchmark.process import ROOT
from tools.benchmark.rounds import Entry, Findings, run_worker
from tools.benchmark.shapes import SHAPES, Shape

RANK = 16
CASES = ((1, Cell("decode", 1, 32, 64)), (8, Cell("decode", 16, 32, 64)))  # number of adapters, and the cell
WITH_ADAPTERS = ("OpenVINO GenAI", "llama.cpp")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "W_pack", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, shape: Shape, checkpoint: Path, seed: int) -> Path:
    """Writes a random adapter in PEFT's format."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": PROJECTIONS}
    config["base_model_name_or_path"] = str(checkpoint)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    for name, dimensions in shape.tensors():
        layer = name.removesuffix(".weight")
        if layer.endswith(PROJECTIONS):
            rows, depth = dimensions
            prefix = f"base_model.model.{layer}"
            tensors[f"{prefix}.lora_A.weight"] = random.standard_normal((RANK, depth), np.float32) / np.float32(
                depth**0.5
            )
            tensors[f"{prefix}.lora_B.weight"] = 0.05 * random.standard_normal((rows, RANK), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load_adapters(runner: CpuRunner, engine: Path, shape: Shape, checkpoint: Path, folder: Path, count: int) -> None:
    """Loads adapters into slots 1 to `count`."""
    for slot in range(1, count + 1):
        source, output = write_adapter(folder / f"peft{slot}", shape, checkpoint, slot), folder / f"adapter{slot}"
        build_adapter(source, engine, output)
        runner.load_adapter(slot, runner.packed(SealedAdapter.open(output)))


def costs(shape: Shape, precision: str, folder: Path, threads: int, rounds: int) -> list[str]:
    """Returns a row of the table: how much longer a step takes in each case, as medians over the rounds."""
    job = Job(OURS_MODULE, precision, shape.name, folder, threads, tuple(cell for _, cell in CASES))
    ours.prepare(job)
    path = EngineDirectory.open(ours.engine_directory(job)).engine_file
    runner = CpuRunner.open(path, num_blocks=ours.num_kv_blocks(job, read_header(path).block_size), threads=threads)
    row = [precision]
    with TemporaryDirectory(prefix="llmserve-adapters-") as temporary:
        most = max(count for count, _ in CASES)
        load_adapters(runner, path.parent, shape, job.checkpoint, Path(temporary), most)
        for count, cell in CASES:
            slots: Sequence[Sequence[int]] = (
                (),
                [1 + sequence * count // cell.batch for sequence in range(cell.batch)],
            )
            models = [ours.RunnerModel(runner, ours.build_plan(job), {}, adapters=each) for each in slots]
            found: list[list[float]] = [[], []]
            for number in range(rounds):
                prompts = random_prompts(cell, shape.vocab, number)
                for index in (0, 1) if number % 2 else (1, 0):
                    warm_up(models[index], cell, prompts)
                    found[index].append(1 / measure_cell(models[index], cell, prompts, max_seconds=60).rate)
            row.append(percents([adapted / base for base, adapted in zip(*found, strict=True)]))
    runner.close()
    return row


def percents(ratios: Sequence[float]) -> str:
    return "{:+.1f} % ({:+.1f} to {:+.1f})".format(
        *(100 * (ratio - 1) for ratio in (statistics.median(ratios), min(ratios), max(ratios)))
    )


def peer_cost(entry: Entry, rounds: int) -> str:
    """Returns how much longer a step takes with one adapter at batch 1, or why it was not measured."""
    (_, cell), *_ = CASES
    with TemporaryDirectory(prefix="peft-", dir=entry.job.folder) as temporary:
        adapter = write_adapter(Path(temporary) / "one", entry.job.shape, entry.job.checkpoint.resolve(), 1)
        jobs = [replace(entry.job, cells=(cell,), adapter=each) for each in ("", str(adapter))]
        if reason := run_worker("prepare", replace(entry, job=jobs[0]), Findings()):
            return reason
        seconds: list[list[float]] = [[], []]
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                found, one = Findings(), replace(entry, job=replace(jobs[index], seed=1000 * number))
                if reason := run_worker("measure", one, found):
                    return reason
                seconds[index].append(1 / statistics.median(found.rates(str(one), cell)))
    return percents([adapted / base for base, adapted in zip(*seconds, strict=True)])


def peer_rows(job: Job, rounds: int) -> list[list[str]]:
    environment = Environment(ROOT / ".venv-bench", say)
    chosen = [peer for peer in PEERS if peer.precision == job.precision and peer.engine in WITH_ADAPTERS]
    missing = environment.install(groups_of(peer.requirement for peer in chosen))
    rows = []
    for peer in chosen:
        reason = missing.get(peer.requirement)
        entry = Entry(peer, replace(job, module=peer.module), environment.python)
        rows.append([str(peer), reason or peer_cost(entry, rounds), "the same adapters for all sequences only"])
        say(" ".join(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", action="append", help="float16, int8, int4; may be repeated; all by default")
    parser.add_argument("--shape", choices=("tiny", "0.4b", "1.1b", "7b-layers", "llama-7b-layers"), default="0.4b")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="llama.cpp and OpenVINO GenAI, installed into .venv-bench")
    parser.add_argument("--folder", type=Path, default=ROOT / "engines/bench", help="for the network and its engines")
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    make_checkpoint(given.folder / f"checkpoint-{shape.name}", shape)
    rows = []
    for precision in given.precision or ("float16", "int8", "int4"):
        rows.append(costs(shape, precision, given.folder.resolve(), given.threads, given.rounds))
        say(" ".join(rows[-1]))
        if given.peers:
            job = Job("", precision, shape.name, given.folder.resolve(), given.threads, ())
            rows += peer_rows(job, given.rounds)
    machine = f"{machine_name()}; {given.threads} threads"
    say(f"\n{machine}; {shape.name}; rank {RANK}; {given.rounds} rounds: time of a token, beside the base's\n")
    say(table(["precision", *(f"{count} adapters at batch {cell.batch}" for count, cell in CASES)], rows))


if __name__ == "__main__":
    main()
