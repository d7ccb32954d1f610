"""Tactics: which one is chosen and why, and that none of them changes a bit."""

from __future__ import annotations

import json
import math
import platform
import random
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from llmserve.engine.cpu import tactics
from llmserve.engine.cpu.layout import DType, LinearShape, read_linear_layers
from llmserve.engine.cpu.runner import CpuRunner, available_isas
from llmserve.engine.cpu.tactics import (
    ROW_BUCKETS,
    choose,
    linear_shapes,
    num_timed_bytes,
    row_times,
    tactic_table,
    this_machine,
    time_tactics,
)
from llmserve.engine.directory.artifact import CACHE_FILE
from llmserve.engine.native.library import load_library
from llmserve.engine.tactics import TacticCache
from llmserve.errors import InvalidArgument
from llmserve.scheduler.settings import SchedulerSettings
from tests.engine.cpu.conftest import EngineFile, OpenRunner
from tests.engine.cpu.networks import all_logits, random_ids

SHAPE = LinearShape(DType.FLOAT16, 64, 96)
ISAS = available_isas()
FORMATS = [("float32", ""), ("float16", ""), ("bfloat16", ""), ("float32", "int8"), ("float32", "int4")]


def tactic_names(isa: str, weight_type: DType, rows: int) -> list[str]:
    return load_library().tactics(isa, weight_type, rows)[0]


def cache_with(timings: dict[str, float], rows: int = 1) -> TacticCache:
    return TacticCache(this_machine(), {str(SHAPE): {str(rows): timings}})


def test_without_timings_the_defaults_are_used() -> None:
    choices = choose(TacticCache(this_machine()), SHAPE)
    assert [choice.rows for choice in choices] == list(ROW_BUCKETS)
    assert {choice.reason for choice in choices} == {"default, not measured on this machine"}
    for choice in choices:
        names, default = load_library().tactics("", SHAPE.weight_type, choice.rows)
        assert (choice.index, choice.tactic) == (default, names[default])


def test_the_fastest_tactic_wins_unless_it_hardly_differs_from_the_default() -> None:
    names, index = load_library().tactics("", SHAPE.weight_type, 1)
    default = names[index]
    other = next(name for name in names if name != default)
    assert choose(cache_with({default: 100.0, other: 90.0}), SHAPE)[0].tactic == other
    assert choose(cache_with({default: 100.0, other: 99.0}), SHAPE)[0].tactic == default
    assert choose(cache_with({default: 100.0, other: 90.0}), SHAPE)[1].reason == "default, not measured on this machine"
    assert choose(cache_with({"99x9": 1.0, default: 100.0}), SHAPE)[0].tactic == default, "no such tactic here"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format_version": 1}', '{"format_version": 1, "machine": 3}'])
def test_a_cache_that_cannot_be_used_is_as_good_as_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / CACHE_FILE
    path.write_text(content)
    assert TacticCache.load(path, this_machine()) == TacticCache(this_machine())
    assert TacticCache.load(tmp_path / "nothing", this_machine()) == TacticCache(this_machine())


def test_timings_of_another_machine_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / CACHE_FILE
    cache_with({"6x4": 1.0}).save(path)
    assert TacticCache.load(path, this_machine()).timings(str(SHAPE), 1) == {"6x4": 1.0}
    content = json.loads(path.read_text())
    content["machine"]["device"] = "another"
    path.write_text(json.dumps(content))
    assert TacticCache.load(path, this_machine()).microseconds == {}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_every_shape_is_timed_once(dtype: str, quantization: str, isa: str, engine_file: EngineFile) -> None:
    path = engine_file("rope", dtype, quantization)
    machine = this_machine(isa)
    done: list[int] = []
    cache = time_tactics(path, TacticCache(machine), done.append)
    assert sum(done) == num_timed_bytes(path)
    for shape in linear_shapes(path):
        for rows in ROW_BUCKETS:
            assert list(cache.timings(str(shape), rows)) == tactic_names(isa, shape.weight_type, rows)
            assert all(value >= 0 for value in cache.timings(str(shape), rows).values())
    assert time_tactics(path, cache, done.append) == cache, "known timings are kept"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_no_tactic_changes_a_bit(
    dtype: str, quantization: str, isa: str, engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    path = engine_file("rope", dtype, quantization)
    runner = open_runner(path, isa=isa, threads=2)
    ids = random_ids(runner.info.vocab_size, 60)
    wanted = all_logits(runner, ids)
    rng = random.Random(0)
    num_ops, layers = read_linear_layers(path)
    for _ in range(4):
        table = bytearray(num_ops * len(ROW_BUCKETS))
        for index, shape in layers.items():
            for bucket, rows in enumerate(ROW_BUCKETS):
                num_tactics = len(tactic_names(isa, shape.weight_type, rows))
                table[index * len(ROW_BUCKETS) + bucket] = rng.randrange(num_tactics)
        runner.set_tactics(bytes(table))
        np.testing.assert_array_equal(all_logits(runner, ids), wanted)


def test_amx_is_offered_where_it_runs() -> None:
    """For sixteen rows or more, and weights whose groups have 32 inputs."""
    found = [flags for flags in Path("/proc/cpuinfo").read_text().splitlines() if flags.startswith("flags")]
    here = {"amx_tile", "amx_int8"} <= set(" ".join(found).split()) and "avx512" in ISAS

    def offered(weight_type: DType) -> list[int]:
        return [rows for rows in ROW_BUCKETS if "16x1 amx" in tactic_names("", weight_type, rows)]

    wanted = [rows for rows in ROW_BUCKETS if rows >= 16] if here else []
    assert {weight_type.name: offered(weight_type) for weight_type in DType} == {
        weight_type.name: wanted if weight_type.name in ("INT8", "INT4", "INT5") else [] for weight_type in DType
    }


@pytest.mark.parametrize("weight_type", [DType.INT8, DType.INT4, DType.INT5])
def test_amx_is_the_default_for_33_rows_and_more(weight_type: DType) -> None:
    """An engine that comes from another machine, or from before an update, has no times that count."""
    chosen = choose(TacticCache(this_machine()), LinearShape(weight_type, 64, 96))
    wanted = {rows for rows in ROW_BUCKETS if rows > 32 and "16x1 amx" in tactic_names("", weight_type, rows)}
    assert {choice.rows for choice in chosen if choice.tactic == "16x1 amx"} == wanted


def test_rows_cost_what_all_layers_take(engine_file: EngineFile, tmp_path: Path) -> None:
    path = tmp_path / "rank0.engine"
    shutil.copy(engine_file("rope", "float32", ""), path)
    assert row_times(path, this_machine()) == ()
    times = {str(rows): {"a": 10.0 + 2 * rows, "b": 90.0} for rows in ROW_BUCKETS}
    known = {str(shape): times for shape in linear_shapes(path)}
    TacticCache(this_machine(), known).save(tmp_path / CACHE_FILE)
    num_layers = len(read_linear_layers(path)[1])
    wanted = tuple((rows, num_layers * (10.0 + 2 * min(rows, 40))) for rows in ROW_BUCKETS)
    assert row_times(path, this_machine()) == wanted
    runner = CpuRunner.open(path, num_blocks=4)
    assert runner.info.scheduler_config(SchedulerSettings()).row_times == wanted
    runner.close()
    for damaged in (math.nan, math.inf, -1.0):
        TacticCache(this_machine(), {shape: times | {"2": {"a": damaged}} for shape in known}).save(
            tmp_path / CACHE_FILE
        )
        assert row_times(path, this_machine()) == ()
    times["4"] = {"a": 5000.0, "b": 7000.0}  # both were interrupted
    TacticCache(this_machine(), known).save(tmp_path / CACHE_FILE)
    assert dict(row_times(path, this_machine())) == {**dict(wanted), 4: dict(wanted)[8]}
    del times["16"]
    TacticCache(this_machine(), known).save(tmp_path / CACHE_FILE)
    assert row_times(path, this_machine()) == ()


def test_impossible_tables_are_refused(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    path = engine_file("rope", "float32", "")
    runner = open_runner(path)
    table = tactic_table(path, this_machine())
    with pytest.raises(InvalidArgument, match=f"the engine has {len(table)} tactics, got 3"):
        runner.set_tactics(b"\0\0\0")
    first = min(read_linear_layers(path)[1]) * len(ROW_BUCKETS)
    with pytest.raises(InvalidArgument, match="has no tactic 200"):
        runner.set_tactics(table[:first] + b"\xc8" + table[first + 1 :])
    runner.set_tactics(table)


@pytest.mark.parametrize(
    ("weight_type", "shape", "num_more"),
    [
        (0, (0, 1), 0),
        (0, (1, 1 << 20), 0),
        (0, (8, 8), 99),
        (0, (8, 8), -1),
        (len(DType), (8, 8), 0),
        (len(DType) + 2, (8, 8), 0),
    ],
)
def test_impossible_trials_are_refused(weight_type: int, shape: tuple[int, int], num_more: int) -> None:
    num_tactics = len(tactic_names("portable", DType.FLOAT16, 4)) + num_more
    with pytest.raises(InvalidArgument, match="cannot be"):
        load_library().time_tactics("portable", weight_type, shape, 4, num_tactics)


def test_weights_of_a_trial_are_written_once_for_all_tactics() -> None:
    """They are 64 MiB, so that no run finds its weights in a cache."""
    names = tactic_names("", DType.FLOAT16, 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    seconds = load_library().time_tactics("", DType.FLOAT16, (512, 2048), 1, len(names))
    num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert len(seconds) == len(names)
    assert num_faults * resource.getpagesize() < 80 * 2**20


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Xeon\n\nprocessor\t: 1\n", "Xeon 6 85"),
        (
            "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
            "CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n",
            "0x41 0x3 0xd0c",
        ),
        ("", platform.machine()),
    ],
)
def test_timings_belong_to_a_model_of_processor(cpuinfo: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    assert tactics.cpu_name() == name
