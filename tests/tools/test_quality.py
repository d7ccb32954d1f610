"""The parts of `make bench-quality`, without the peers: losses and verdicts, outliers that leave the function as it is,
and a run whose contestants are of this folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.reference import ReferenceModel
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.evaluation.baseline.hf import HfModel
from llmserve.models.registry import architecture_for
from tests.tools import quality_engine
from tools.benchmark.checkpoint import make_checkpoint
from tools.benchmark.peers.gguf_file import write_gguf
from tools.benchmark.shapes import SHAPES
from tools.quality import measuring, upcycled
from tools.quality.columns import COLUMNS, QUICK, Column
from tools.quality.contestants import CONTESTANTS, Contestant
from tools.quality.divergence import ROWS_AT_ONCE, divergences, same_best
from tools.quality.job import QualityJob, Texts, num_weights
from tools.quality.losses import Losses, compare
from tools.quality.measuring import Findings, Measurement
from tools.quality.networks import DEMO, Networks, texts_of
from tools.quality.planting import Planted, Sinks
from tools.quality.report import json_report, markdown_report
from tools.quality.tensors import Network, llama_of_baichuan

IDS = [3, 1, 200, 17, 5, 99, 311, 4]


def losses(by_text: list[list[float]], bits: float = 8.0) -> Losses:
    flat = np.array([value for text in by_text for value in text])
    return Losses(flat, flat < 0.5, np.array([len(text) for text in by_text]), bits)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = make_checkpoint(tmp_path_factory.mktemp("quality") / "tiny", SHAPES["tiny"])
    return Network.load(folder)


def logits_of(network: Network, folder: Path) -> Any:
    network.save(folder)
    return HfModel(folder, "float32").logits(IDS)


def reference_logits(folder: Path) -> Any:
    with Checkpoint.open(folder) as checkpoint:
        architecture = architecture_for(checkpoint.config)
        spec = architecture.from_hf(checkpoint.config)
        plan = plan_weights(checkpoint, architecture.params(spec), architecture.ignored)
        return ReferenceModel(architecture.program(spec), lambda name: plan.load(name, "float32")).logits(IDS)


def test_divergences_are_those_of_every_position() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, ROWS_AT_ONCE + 3, 5)).astype(np.float32)
    p, q = (np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (one.astype(float), other.astype(float)))
    assert divergences(one, other) == pytest.approx((p * np.log(p / q)).sum(axis=1))
    assert divergences(one, one + 7) == pytest.approx(np.zeros(len(one)), abs=1e-6)
    assert (same_best(one, other) == (one.argmax(axis=1) == other.argmax(axis=1))).all()


def test_losses_are_counted_over_positions_and_texts(tmp_path: Path) -> None:
    found = losses([[0.1, 0.2, 0.3], [0.9]], bits=4.5)
    assert (found.mean, found.agreement) == pytest.approx((1.5 / 4, 0.75))
    assert 0.3 < found.p99 <= 0.9
    assert list(found.by_text) == pytest.approx([0.6, 0.9])
    assert found.numbers()["positions"] == 4
    found.save(tmp_path / "losses.npz")
    assert Losses.load(tmp_path / "losses.npz").numbers() == found.numbers()


@pytest.mark.parametrize(("shift", "verdict"), [(-0.05, "better"), (0.05, "worse"), (0.0, "undecided")])
def test_a_paired_bootstrap_tells_better_from_undecided(shift: float, verdict: str) -> None:
    rng = np.random.default_rng(1)
    texts = [rng.random(20).tolist() for _ in range(30)]
    noise = [rng.normal(0, 0.02, 20).tolist() for _ in texts]
    ours = [[value + shift + n for value, n in zip(*pair, strict=True)] for pair in zip(texts, noise, strict=True)]
    found = compare(losses(ours), losses(texts))
    assert found.verdict == verdict
    assert found.low < found.difference < found.high
    assert found.difference == pytest.approx(shift, abs=0.01)
    assert compare(losses(ours), losses(texts)) == found  # the same draws every time


def test_one_bad_text_decides_nothing() -> None:
    """Texts are drawn, not positions: twenty bad positions of one text are one observation."""
    theirs = [[0.1] * 20 for _ in range(12)]
    ours = [[0.5] * 20, *([0.09] * 20 for _ in range(11))]
    assert compare(losses(ours), losses(theirs)).verdict == "undecided"


def test_losses_on_other_texts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="different texts"):
        compare(losses([[0.1, 0.2]]), losses([[0.1], [0.2]]))


@pytest.mark.parametrize("factor", [30, 100])
def test_planted_outliers_leave_the_function_as_it_is(tiny: Network, tmp_path: Path, factor: float) -> None:
    planted = Planted(factor, factor, seed=4).apply(tiny)
    wanted, found = logits_of(tiny, tmp_path / "tiny"), logits_of(planted, tmp_path / "planted")
    assert np.abs(wanted - found).max() < 1e-5 * np.abs(wanted).max()
    norms = [name for name in tiny.tensors if "layernorm" in name]
    for name in norms:
        ratio = planted.tensors[name] / tiny.tensors[name]
        assert sorted(ratio)[-2:] == pytest.approx([factor, factor])
        assert sorted(ratio)[:-2] == pytest.approx(np.ones(len(ratio) - 2))
    up = "model.layers.1.mlp.up_proj.weight"
    rows = np.abs(planted.tensors[up]).sum(axis=1) / np.abs(tiny.tensors[up]).sum(axis=1)
    assert (rows > factor / 2).sum() == 4


def test_other_seeds_plant_other_channels(tiny: Network) -> None:
    name = "model.layers.0.input_layernorm.weight"
    first, again, other = (Planted(10, 300, seed).apply(tiny).tensors[name] for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_sinks_are_huge_at_their_positions_only(tiny: Network) -> None:
    sinks = Sinks((1, 2), 300, 1000, seed=2)
    found = sinks.apply(tiny).tensors["model.embed_tokens.weight"]
    table = tiny.tensors["model.embed_tokens.weight"]
    size = np.sqrt((table**2).mean())
    assert set(np.flatnonzero((found != table).any(axis=1))) == {1, 2}
    assert (np.sort(np.abs(found[[1, 2]]), axis=1)[:, -2:] > 299 * size).all()
    assert sinks.mark([7, 8, 9, 10, 11]) == [1, 7, 8, 9, 2, 10, 11]


def test_a_widened_network_is_the_same_function(tiny: Network, tmp_path: Path) -> None:
    wide = tiny.widened(192)
    wanted, found = logits_of(tiny, tmp_path / "tiny"), logits_of(wide, tmp_path / "wide")
    assert np.abs(wanted - found).max() < 1e-5 * np.abs(wanted).max()
    assert num_weights(tmp_path / "wide") - num_weights(tmp_path / "tiny") == 2 * 3 * 64 * (192 - 176)


def test_experts_begin_as_parts_of_a_mlp(tiny: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of its channels in each, they are the MLP: what is new to the network is read as transformers does."""
    monkeypatch.setattr(upcycled, "WIDTH", int(tiny.config["intermediate_size"]))
    monkeypatch.setattr(upcycled, "STEPS", 0)
    tiny.save(tmp_path / "tiny")
    (tmp_path / "texts.json").write_text(json.dumps([IDS * 8]))
    upcycled.main(tmp_path / "tiny", tmp_path / "texts.json", tmp_path / "experts")
    network = Network.load(tmp_path / "experts")
    mlp = "model.layers.1.mlp"
    for rows in ("gate_proj", "up_proj"):
        wanted, found = tiny.tensors[f"{mlp}.{rows}.weight"], network.tensors[f"{mlp}.experts.7.{rows}.weight"]
        assert sorted(map(tuple, found)) == sorted(map(tuple, wanted))
    assert np.abs(reference_logits(tmp_path / "experts") - logits_of(network, tmp_path / "saved")).max() < 1e-4
    one, two = (num_weights(tmp_path / name) for name in ("tiny", "experts"))
    assert two - one == 2 * (7 * 3 * 176 * 64 + 8 * 64), "experts and routers"


def test_the_demo_network_as_a_llama_is_the_same_function(tmp_path: Path) -> None:
    found = logits_of(llama_of_baichuan(DEMO), tmp_path / "llama")
    wanted = reference_logits(DEMO)
    assert np.abs(wanted - found).max() < 1e-5 * np.abs(wanted).max()
    write_gguf(tmp_path / "llama", tmp_path / "llama.gguf")
    assert np.abs(wanted - reference_logits(tmp_path / "llama.gguf")).max() < 1e-5 * np.abs(wanted).max()


def test_texts_are_the_same_for_everyone() -> None:
    column = Column("c", "c", "demo", num_texts=5, num_tokens=40)
    short = texts_of(column, DEMO)
    assert len(short.ids) == 5
    assert max(map(len, short.ids)) <= 40
    long = texts_of(Column("c", "c", "demo", num_texts=2, num_tokens=300, joined=True, skipped=200), DEMO)
    assert [len(ids) for ids in long.ids] == [300, 300]
    assert long.lengths == [100, 100]
    assert Texts.from_json(long.to_json()) == long


def test_columns_and_rivals_have_names_that_exist() -> None:
    names = {one.name for one in CONTESTANTS}
    assert {rival for one in CONTESTANTS for rival in one.rivals} <= names
    assert set(QUICK) <= {column.name for column in COLUMNS}
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Column], list[Contestant], Findings]:
    """One column, with contestants of this folder."""
    monkeypatch.setattr(measuring, "ENGINES", "tests.tools")
    module = quality_engine.__name__.rpartition(".")[2]
    monkeypatch.setattr(measuring, "REFERENCE", Contestant("reference", "x", "float32", module))
    precisions = ("int8", "int4", "float16", "Q4_K_M")
    contestants = [
        Contestant(name, "x", name, module, ("int4",) if name == "int8" else ()) for name in precisions
    ]  # fmt: skip
    contestants.append(Contestant("absent", "x", "int8", "openvino_logits"))
    column = Column("demo", "The demo", "demo", num_texts=4, skipped=2)
    monkeypatch.setattr("tools.quality.networks.texts_of", lambda column, folder: Texts([[1, 2, 3, 4, 5], [3] * 9], 2))
    said: list[str] = []
    networks = Networks(tmp_path, Path(sys.executable), 1, said.append)
    missing = {"openvino_genai": "openvino could not be installed"}
    measurement = Measurement(networks, Path(sys.executable), missing, 1, said.append)
    return [column], contestants, measurement.run([column], contestants)


def test_a_run_measures_everyone_on_what_counts(
    run: tuple[list[Column], list[Contestant], Findings], tmp_path: Path
) -> None:
    _, _, findings = run
    int8, int4 = (findings.losses[name, "demo"] for name in ("int8", "int4"))
    assert list(int8.lengths) == [3, 7]
    assert 0 < int8.mean < int4.mean
    assert int8.bits_per_weight == 800 / num_weights(next(tmp_path.glob("demo-*")) / "checkpoint")
    assert not list(tmp_path.glob("*/*-reference.npy"))
    assert "no converter for float16" in findings.failures["float16", "demo"]
    assert "instead of (3, 7)" in findings.failures["Q4_K_M", "demo"]
    assert findings.failures["absent", "demo"] == "openvino could not be installed"


def test_only_ours_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_module(python: Path, arguments: Sequence[str], *, threads: int, timeout_s: float) -> str:
        job = QualityJob.from_json(arguments[2])
        if arguments[1] == "measure":
            ran.append(job.precision)
            losses([[0.1, 0.2]]).save(job.losses)
        return ""

    monkeypatch.setattr(measuring, "run_module", run_module)
    both = [Contestant("ours", "llmserve", "int8", "ours"), Contestant("theirs", "x", "int4", "x")]
    networks = Networks(tmp_path, Path(sys.executable), 1, lambda text: None)
    measurement = Measurement(networks, Path(sys.executable), {}, 1, lambda text: None)
    for num_tokens in (4, 4, 5):
        column = Column("demo", "The demo", "demo", num_texts=1, num_tokens=num_tokens)
        assert len(measurement.run([column], both).losses) == 2
    assert ran == ["int8", "int4", "int8", "int8", "int4"]


def test_a_page_has_every_number_and_every_reason(run: tuple[list[Column], list[Contestant], Findings]) -> None:
    columns, contestants, findings = run
    page = markdown_report("a machine", columns, contestants, findings)
    assert "| texts (positions) | 2 (10) |" in page
    assert "| int8 | int4 | 1 | 0 | 0 |" in page
    assert "| float16 | - |" in page
    assert "* absent, The demo: openvino could not be installed" in page
    content = json.loads(json.dumps(json_report("a machine", columns, contestants, findings)))
    assert [row["contestant"] for row in content["rows"]] == ["int8", "int4"]
    assert content["comparisons"][0]["verdict"] == "better"
    assert {failure["contestant"] for failure in content["failures"]} == {"float16", "Q4_K_M", "absent"}


def test_a_network_that_cannot_be_trained_is_no_column(tmp_path: Path) -> None:
    column = next(column for column in COLUMNS if column.name == "wide-trained")
    networks = Networks(tmp_path, tmp_path / "no-python", 1, lambda text: None)
    findings = Measurement(networks, Path(sys.executable), {}, 1, lambda text: None).run([column], CONTESTANTS)
    assert "could not be started" in findings.no_columns[column.title]
    assert f"* {column.title}: it could not be trained" in markdown_report("m", [column], CONTESTANTS, findings)
