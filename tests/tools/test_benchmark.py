"""The benchmark's parts: checkpoints that engines are built from, workloads, bounds and ratios, and failures that are
reported. Nothing here is about how fast anything is."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.evaluation.baseline.hf import HfModel
from tests.tools import benchmark_engine
from tools.benchmark import environment, ours, rounds
from tools.benchmark.bounds import Limits, bounds
from tools.benchmark.cells import LONG_CELLS, PREFILL_CALLS, WARM_STEPS, Cell, measure_cell, random_prompts
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.contestants import OURS, OURS_MODULE, PEERS, Contestant
from tools.benchmark.job import Job
from tools.benchmark.options import parse
from tools.benchmark.peers.gguf_file import write_gguf
from tools.benchmark.process import ROOT
from tools.benchmark.report import json_report, markdown_report
from tools.benchmark.rounds import Findings
from tools.benchmark.serving import serve
from tools.benchmark.shapes import SHAPES, GptOssShape, Lfm2Shape, OlmoeShape, Qwen3MoeShape, Shape
from tools.benchmark.statistics import Spread, quantile
from tools.benchmark.table import ratios_at_no_greater_loss, ratios_of, rows_of
from tools.benchmark.workload import Task, arriving, ideal_gain, mixed_tasks, static_batches
from tools.quality.losses import Losses

TINY = SHAPES["tiny"]
CELLS = (Cell("prefill", 1, 24, 1), Cell("decode", 1, 4, 12), Cell("decode", 3, 4, 12))
LIMITS = {"read_bytes": 1e10, "products": 1e11, "products_int8": 4e11}
COUNTING = benchmark_engine.__name__


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_checkpoint(path / "checkpoint-tiny", TINY)
    return path


def job(folder: Path, precision: str = "float32", module: str = OURS_MODULE) -> Job:
    return Job(module, precision, "tiny", folder, threads=1, cells=CELLS, passes=1)


def test_shapes_are_of_the_size_that_their_names_say() -> None:
    assert SHAPES["0.4b"].num_parameters == 415_214_464
    assert SHAPES["1.1b"].num_parameters == 1_100_048_384


def test_a_checkpoint_has_the_tensors_of_its_shape_and_repeats(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "checkpoint-tiny" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict(TINY.tensors())
    assert sum(tensor.size for tensor in tensors.values()) == TINY.num_parameters
    assert all(tensor.dtype == np.float16 for tensor in tensors.values())
    again = make_checkpoint(tmp_path / "again", TINY)
    first, second = (path / "model.safetensors" for path in (folder / "checkpoint-tiny", again))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_our_engine_decodes_what_the_reference_decodes(folder: Path, precision: str) -> None:
    ours.prepare(job(folder, precision))
    model = ours.open_model(job(folder, precision))
    prompts = random_prompts(CELLS[2], TINY.vocab, seed=1)
    sample = measure_cell(model, CELLS[2], prompts, max_seconds=60)
    assert (sample.tokens, len(sample.ids)) == (3 * 11, 12)
    if precision == "float32":
        hf = HfModel(job(folder).checkpoint, "float32")
        [answer] = hf.generate(prompts[:1], max_tokens=12, end_ids=[], pad_id=0)
        assert sample.ids == tuple(answer.token_ids)
    assert measure_cell(model, CELLS[0], random_prompts(CELLS[0], TINY.vocab, seed=1), max_seconds=60).tokens == 24
    heads = TINY.kv_elements_per_token / TINY.head_dim
    head_bytes = 4 * TINY.head_dim if precision == "float32" else TINY.head_dim + 4  # integers and a scale
    assert model.kv_bytes_per_token == heads * head_bytes


def test_a_prompt_longer_than_a_step_is_computed_in_pieces(folder: Path) -> None:
    cell = Cell("decode", 2, 2100, 4)
    wide = replace(job(folder), cells=(cell,))
    ours.prepare(wide)
    prompts = random_prompts(cell, TINY.vocab, seed=1)
    sample = measure_cell(ours.open_model(wide), cell, prompts, max_seconds=60)
    [answer] = HfModel(wide.checkpoint, "float32").generate(prompts[:1], max_tokens=6, end_ids=[], pad_id=0)
    assert sample.tokens == 2 * 3
    assert sample.ids == tuple(answer.token_ids[WARM_STEPS:])  # steps that warm up are not counted


def test_cells_of_long_prompts_are_measured_once_and_not_by_everyone(tmp_path: Path) -> None:
    assert [cell.name for cell in LONG_CELLS[::3]] == ["prefill 2000", "batch 8 after 1900"]
    assert {cell.calls for cell in LONG_CELLS} == {1}
    both = replace(job(tmp_path), cells=(*CELLS, *LONG_CELLS))
    patient, impatient = (Contestant("x", "int8", "m", longest_prompt=most) for most in (9000, 1000))
    entries = rounds.entries_for([patient, impatient], ["tiny"], lambda one: Path(sys.executable), both)
    assert [entry.job.cells for entry in entries] == [both.cells, CELLS]
    once = benchmark_engine.measured(replace(both, passes=2, cells=(CELLS[1], LONG_CELLS[0], LONG_CELLS[2])))
    assert once == {"batch 1": 2, "prefill 2000": 1, "batch 1 after 1900": 1}


def test_quick_runs_leave_long_prompts_out_and_cells_can_be_picked() -> None:
    def names(*arguments: str) -> list[str]:
        return [cell.name for cell in parse("", minutes=1, arguments=arguments).job().cells]

    assert not any(cell.is_long for cell in parse("", minutes=1, arguments=["--quick"]).job().cells)
    assert names("--cell", "prefill", "--cell", "7900") == [
        "prefill 512", "prefill 2000", "prefill 8000", "batch 1 after 7900", "batch 8 after 7900"
    ]  # fmt: skip


def test_the_whole_engine_reports_everything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.benchmark.serving.NUM_TASKS", 40)
    records: list[dict[str, Any]] = []
    ours.prepare(job(folder))
    serve(job(folder), records.append)
    assert [record["what"] for record in records] == ["opening", "python", "batching", "load"]
    opening, python, batching, load = records
    share = python["share"]
    assert 0 < share < 1
    assert python["steps"] > 0  # of a full batch: on a busy machine the requests come one after the other
    assert batching["ideal_gain"] > 1.5
    assert load["first_token_p95_ms"] >= load["first_token_p50_ms"] > 0
    assert opening["file_bytes"] > TINY.num_parameters


def test_mixed_tasks_are_mostly_short_and_within_their_limits() -> None:
    tasks = mixed_tasks(4000, vocab=100, prompt_tokens=5, seed=3)
    lengths = [task.new_tokens for task in tasks]
    assert (min(lengths), max(lengths)) == (8, 256)
    octaves = [sum(low <= n < 2 * low for n in lengths) for low in (8, 16, 32, 64, 128)]
    assert max(octaves) < 1.2 * min(octaves)
    assert all(len(task.prompt) == 5 and min(task.prompt) >= 3 and max(task.prompt) < 100 for task in tasks)
    assert tasks == mixed_tasks(4000, vocab=100, prompt_tokens=5, seed=3)


def test_static_batches_wait_for_their_longest_answer() -> None:
    tasks = [Task((3,), n) for n in (8, 2, 2, 4, 6)]
    assert [len(batch) for batch in static_batches(tasks, 2)] == [2, 2, 1]
    # 8 + 4 + 6 steps; two places could do it in 11
    assert ideal_gain(tasks, 2) == pytest.approx(18 / 11)
    assert ideal_gain(tasks[:1], 2) == 1.0


def test_arrivals_begin_at_once_and_keep_their_rate() -> None:
    times = [task.arrival_s for task in arriving([Task((3,), 1)] * 2000, per_second=10.0)]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)


def test_bounds_count_what_is_read_and_multiplied() -> None:
    int8, float16 = Contestant("x", "int8", "m"), Contestant("x", "float16", "m")
    limits = Limits(read_bytes=1e9, products=1e9, products_int8=4e9)
    decode, prefill = Cell("decode", 4, 10, 20), Cell("prefill", 1, 100, 1)
    counts: dict[str, Any] = {"weight_bytes": 1_000_000, "kv_bytes_per_token": 50.0}
    found = bounds(decode, int8, TINY, limits, **counts)
    assert found.reading == pytest.approx(4e9 / (1_000_000 + 4 * 20 * 50))
    assert found.multiplying == pytest.approx(4e9 / (TINY.layer_products + TINY.head_products))
    assert bounds(decode, float16, TINY, limits, **counts).multiplying == pytest.approx(found.multiplying / 4)
    found = bounds(prefill, float16, TINY, limits, **counts)
    assert found.multiplying == pytest.approx(100e9 / (100 * TINY.layer_products + TINY.head_products))
    assert found.nearer == min(found.reading, found.multiplying)


def test_spreads_and_quantiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([3000.0, 1000.0, 2000.0]).text() == "2,000 (1,000-3,000)"
    assert Spread.of([1500.0]).text(1000, 1) == "1.5"
    assert [quantile(range(1, 101), fraction) for fraction in (0.0, 0.5, 0.95, 1.0)] == [1, 51, 96, 100]


def findings_of(rates: dict[tuple[str, str], dict[str, float]], folder: Path) -> tuple[list[rounds.Entry], Findings]:
    """(engine, precision) -> rates of the decode cells; llmserve is ours."""
    findings = Findings(limits=[LIMITS])
    entries = []
    for (engine, precision), cells in rates.items():
        module = OURS_MODULE if engine == "llmserve" else engine
        contestant = Contestant(engine, precision, module)
        entries += rounds.entries_for([contestant], ["tiny"], lambda one: Path(sys.executable), job(folder))
        opened = {"kind": "opened", "seconds": 1.0, "weight_bytes": 100, "kv_bytes_per_token": 1.0, "versions": {}}
        findings.add(str(entries[-1]), opened)
        for cell, rate in cells.items():
            sample = {"kind": "sample", "cell": cell, "tokens": 10 * rate, "seconds": 10.0, "ids": [1]}
            findings.add(str(entries[-1]), sample)
    return entries, findings


def test_ratios_are_to_the_best_peer_at_equal_precision(tmp_path: Path) -> None:
    entries, findings = findings_of(
        {
            ("llmserve", "bfloat16"): {"batch 1": 30.0, "batch 3": 90.0},
            ("llmserve", "int8"): {"batch 1": 60.0},
            ("a", "float16"): {"batch 1": 20.0, "batch 3": 100.0},
            ("b", "bfloat16"): {"batch 1": 25.0},
            ("b", "int4"): {"batch 1": 500.0},
        },
        tmp_path,
    )
    ratios = ratios_of(rows_of(entries, findings))
    assert [(str(r.contestant), r.cell, str(r.best_peer)) for r in ratios] == [
        ("llmserve bfloat16", "batch 1", "b bfloat16"),
        ("llmserve bfloat16", "batch 3", "a float16"),
    ]
    assert [r.value for r in ratios] == pytest.approx([1.2, 0.9])


def losses_of(mean: float) -> Losses:
    divergence = np.random.default_rng(0).uniform(0.9 * mean, 1.1 * mean, 200)
    return Losses(divergence, divergence < 1, np.full(20, 10), bits_per_weight=8.0)


def test_a_peer_that_loses_more_is_no_measure_of_speed(tmp_path: Path) -> None:
    cell = "batch 1"
    rates = {("llmserve", "int8"): 60.0, ("llmserve", "float16"): 30.0, ("a", "int8"): 50.0, ("b", "int8"): 80.0}
    rates |= {("b", "int4"): 500.0, ("b", "float16"): 20.0, ("c", "int8"): 90.0}
    entries, findings = findings_of({one: {cell: rate} for one, rate in rates.items()}, tmp_path)
    means = {"llmserve int8": 0.01, "a int8": 0.005, "b int8": 0.02, "b int4": 0.2}
    findings.losses = {name: losses_of(mean) for name, mean in means.items()}
    [ratio] = ratios_at_no_greater_loss(rows_of(entries, findings))
    assert (str(ratio.contestant), str(ratio.best_peer)) == ("llmserve int8", "a int8")
    assert ratio.value == pytest.approx(1.2)
    page = markdown_report("Title", "a machine", entries, findings)
    assert "| engine | batch 1 | mean KL, nats |" in page
    assert "| llmserve float16 | 30 |  |" in page
    assert "| b int4 | 500 | 0.2" in page
    assert "| ours over the best peer that does not lose more | batch 1 |" in page
    content = json_report("a machine", entries, findings)
    assert content["losses"]["b int8"]["positions"] == 200
    assert content["ratios_at_no_greater_loss"][0]["best_peer"] == "a int8"
    findings.losses = {}
    assert ratios_at_no_greater_loss(rows_of(entries, findings)) == []


def test_a_failing_engine_is_reported_and_stops_nobody(tmp_path: Path) -> None:
    contestants = [Contestant("counting", name, COUNTING) for name in ("float16", "int4", "int8", "float32")]
    entries = rounds.entries_for(contestants, ["tiny"], lambda one: Path(sys.executable), job(tmp_path))
    entries.append(replace(entries[-1], python=tmp_path / "missing", contestant=Contestant("gone", "int8", COUNTING)))
    said: list[str] = []
    findings = rounds.prepare(entries, said.append)
    rounds.run_rounds(
        entries, findings, rounds=2, minutes=5, measure_limits=lambda: LIMITS, say=said.append
    )  # fmt: skip
    reasons = findings.failures
    assert reasons.keys() == {"counting float16 tiny", "counting int4 tiny", "counting int8 tiny", "gone int8 tiny"}
    assert "no converter for float16" in reasons["counting float16 tiny"]
    assert reasons["counting int4 tiny"].startswith("killed by signal 9: about to crash")
    assert "only one at a time" in reasons["counting int8 tiny"]
    assert "could not be started" in reasons["gone int8 tiny"]
    assert {entry for entry, _ in findings.samples} == {"counting float32 tiny"}
    counts = [len(findings.samples["counting float32 tiny", cell.name]) for cell in CELLS]
    assert counts == [2 * PREFILL_CALLS, 2, 2]
    page = markdown_report("Title", "a machine", entries, findings)
    assert "* counting float16 tiny: " in page
    assert "| counting float32 |" in page
    assert json.loads(json.dumps(json_report("a machine", entries, findings)))["failures"] == reasons


def test_peak_memory_is_not_that_of_the_parent() -> None:
    held = np.ones(2**26)  # 512 MiB
    program = "from tools.benchmark.worker import peak_bytes; print(peak_bytes())"
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(child.stdout) < held.nbytes / 2


def test_no_round_is_begun_that_would_end_too_late(tmp_path: Path) -> None:
    entries = rounds.entries_for(
        [Contestant("counting", "float32", COUNTING)], ["tiny"], lambda one: Path(sys.executable), job(tmp_path)
    )
    said: list[str] = []
    findings = Findings()
    rounds.run_rounds(entries, findings, rounds=5, minutes=0, measure_limits=lambda: LIMITS, say=said.append)
    assert len(findings.samples["counting float32 tiny", "batch 1"]) == 1
    assert said[-1] == "1 rounds of 5: another one would take longer than 0 minutes"


def test_a_peer_that_cannot_be_installed_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(self: environment.Environment, *arguments: str, environment: dict[str, str]) -> str:
        return "No matching distribution" if "openvino" in arguments else ""

    monkeypatch.setattr(environment.Environment, "_pip", pip)
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    said: list[str] = []
    reasons = environment.Environment(folder, said.append).install()
    assert reasons == {"openvino_genai": "openvino could not be installed: No matching distribution"}
    said.clear()
    environment.Environment(folder, said.append).install()
    assert [line for line in said if line.startswith("installing")] == [
        "installing openvino-genai, openvino, openvino-tokenizers"
    ]


def test_compilers_keep_the_whole_configuration_of_tiles(tmp_path: Path) -> None:
    """gcc 12 drops all but its first eight bytes, and llama.cpp ends with SIGILL."""
    flags = shlex.split(environment.native()["CMAKE_ARGS"])[-1].partition("=")[2].split()
    source = """
        #include <immintrin.h>
        void configure(void) { unsigned char tiles[64] = {1}; tiles[63] = 77; _tile_loadconfig(tiles); }
    """
    command = ["cc", "-x", "c", "-", "-O2", "-mamx-tile", "-S", "-o", "-", *flags]
    compiled = subprocess.run(command, input=source, text=True, capture_output=True)
    if "-mamx-tile" in compiled.stderr:
        pytest.skip("a compiler for another processor")
    assert compiled.returncode == 0, compiled.stderr
    assert "77" in compiled.stdout


def test_what_the_source_package_of_ik_llama_cpp_lacks_is_written(tmp_path: Path) -> None:
    common = tmp_path / "vendor/ik_llama.cpp/common"
    (common / "cmake").mkdir(parents=True)
    (common / "build-info.cpp.in").write_text("int LLAMA_BUILD_NUMBER = @BUILD_NUMBER@;\n")
    cmake = Path(sys.executable).with_name("cmake")
    [repaired] = [text for text in environment.from_source()["CMAKE_ARGS"].split() if text.endswith(".cmake")]
    for script, folder in (
        (repaired.partition("=")[2], tmp_path),
        (common / "cmake/build-info-gen-cpp.cmake", common.parent),
    ):
        subprocess.run([cmake, "-P", script], cwd=folder, check=True)
    assert (common / "build-info.cpp").read_text() == "int LLAMA_BUILD_NUMBER = 0;\n"


class TinyMoe(OlmoeShape):
    num_experts, num_chosen = 6, 2


class TinyQwen3Moe(Qwen3MoeShape):
    num_experts, num_chosen = 6, 2


class TinyGptOss(GptOssShape):
    num_experts, num_chosen, head_dim = 6, 2, 16


class TinyLfm2(Lfm2Shape):
    attention = (1,)


@pytest.mark.parametrize(
    "shape",
    [
        TinyMoe("tiny-moe", hidden=64, intermediate=32, layers=2, heads=4, kv_heads=4, vocab=320),
        TinyQwen3Moe("tiny-qwen3-moe", hidden=64, intermediate=32, layers=2, heads=4, kv_heads=2, vocab=320),
        TinyGptOss("tiny-gpt-oss", hidden=64, intermediate=64, layers=2, heads=4, kv_heads=2, vocab=320),
        TinyLfm2("tiny-lfm2", hidden=64, intermediate=96, layers=3, heads=4, kv_heads=2, vocab=320),
    ],
    ids=lambda shape: shape.name,
)
def test_a_network_and_its_gguf_file_are_one(shape: Shape, tmp_path: Path) -> None:
    """What llama.cpp is measured with is what we are measured with: equal parameters, by their digests."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", shape)
    tensors = load_file(checkpoint / "model.safetensors")
    assert sum(tensor.size for tensor in tensors.values()) == shape.num_parameters
    write_gguf(checkpoint, tmp_path / "network.gguf")
    options = BuildOptions(dtype="float32", max_seq_len=64)
    sources = (checkpoint, tmp_path / "network.gguf")
    built = [build_engine(source, tmp_path / f"engine{index}", options) for index, source in enumerate(sources)]
    first, second = (dict(one.tensors) for one in built)
    assert first == second


def test_what_a_step_reads_of_experts() -> None:
    shape = SHAPES["olmoe-layers"]
    assert isinstance(shape, OlmoeShape)
    assert shape.weights_read(1) == 1.0
    experts = shape.layers * shape.num_experts * 3 * shape.hidden * shape.intermediate
    others = shape.layer_products + shape.head_products - experts * shape.num_chosen // shape.num_experts
    assert shape.weights_read(1000) == pytest.approx((others + experts) / (others + experts / 8))
    assert 1 < shape.weights_read(2) < 2
    assert TINY.weights_read(16) == 1.0


def test_only_what_is_asked_for_is_installed() -> None:
    """ik_llama.cpp is compiled for half an hour."""
    chosen = parse("", minutes=1, arguments=["--only", "llama.cpp int8"]).chosen((*OURS, *PEERS))
    assert [str(one) for one in chosen] == ["llama.cpp int8"]
    assert "ik_llama.cpp" not in {group.name for group in environment.groups_of(one.requirement for one in chosen)}
    assert "ik_llama.cpp" in {group.name for group in environment.groups_of(one.requirement for one in PEERS)}
