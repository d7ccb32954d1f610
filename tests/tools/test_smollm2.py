"""The parts of `make demo-smollm2` that need no download."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.checkpoint.expanded import write_expanded
from llmserve.checkpoint.reader import Checkpoint
from tests.gguf_files import make_gguf
from tools import demo_smollm2
from tools.smollm2 import logits, loss, speed


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    file = make_gguf(folder / "m.gguf", "llama-tied", stored="Q4_1", tokenizer="pieces", intermediate_size=192)
    build_engine(file, folder / "e", BuildOptions(dtype="float16"))
    return folder / "e"


def test_a_row_of_the_table(engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setenv("COLUMNS", "200")
    report = engine.parent / "report.json"
    rouge = {"rougeL": {"engine": 15.04, "baseline": 15.5}}
    report.write_text(json.dumps({"suite": {"num_samples": 40}, "metrics": rouge, "verdict": "inconclusive"}))
    facts = demo_smollm2.facts_of(engine, engine, report)
    names = ["engine file", "prompt of 512 tokens", "answer of 64", "KL from e", "same best token"]
    assert list(facts) == [*names, "ROUGE-L of 40 (float32)", "gate"]
    assert all(float(facts[name].split()[0].rstrip("%")) >= 0 for name in names)
    assert (facts["ROUGE-L of 40 (float32)"], facts["gate"]) == ("15.0 (15.5)", "inconclusive")
    assert (facts["KL from e"], facts["same best token"].split()[0]) == ("0.0000 nats", "100.0%")
    demo_smollm2.print_table({"float16": facts})
    printed = capsys.readouterr().out
    assert facts["answer of 64"] in printed
    assert "float16" in printed


@pytest.mark.parametrize("writes", [True, False])
def test_an_engine_that_fails_the_gate_stays_in_the_table(
    writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "llmserve"
    program.write_text(f"#!/bin/sh\n{'echo made > eval-results/e-docstrings-chat.json' if writes else ':'}\nexit 1\n")
    program.chmod(0o755)
    (tmp_path / "eval-results").mkdir()
    monkeypatch.setattr(demo_smollm2, "ROOT", tmp_path)
    monkeypatch.setattr(demo_smollm2, "LLMSERVE", str(program))
    (tmp_path / "eval-results" / "e-docstrings-chat.json").write_text("of another run")
    if writes:
        assert demo_smollm2.summarize(tmp_path / "m.gguf", "int4", tmp_path / "e").read_text() == "made\n"
    else:
        with pytest.raises(SystemExit, match="in int4, beside transformers in float32' failed with exit code 1"):
            demo_smollm2.summarize(tmp_path / "m.gguf", "int4", tmp_path / "e")
    assert "llmserve eval e --hf-model-dir m.gguf --suite eval/suites/docstrings-chat.yaml" in capsys.readouterr().out


def test_what_rounding_costs(engine: Path) -> None:
    build_engine(engine.parent / "m.gguf", engine.parent / "int4", BuildOptions(dtype="float16", quantization="int4"))
    found = loss.loss(loss.next_token_logits(engine), loss.next_token_logits(engine.parent / "int4"))
    assert found.divergence > 1e-6
    assert 0 < found.agreement <= 1
    assert found.num_positions > 20 * loss.NUM_TEXTS


def test_divergence() -> None:
    rng = np.random.default_rng(0)
    one = rng.standard_normal((5, 7)).astype(np.float32)
    assert logits.mean_divergence(one, one + 3) == pytest.approx(0, abs=1e-9)  # the same distributions
    two = np.log(np.array([[0.5, 0.5]], np.float32)), np.log(np.array([[0.25, 0.75]], np.float32))
    assert logits.mean_divergence(*two) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)


def test_logits_of_the_engine_are_near_those_of_transformers(engine: Path, tmp_path: Path) -> None:
    with Checkpoint.open(engine.parent / "m.gguf") as checkpoint:
        write_expanded(checkpoint, tmp_path / "expanded")
        ids = [1, 5, 9, 200, 31]
        wanted = logits.transformers_logits(tmp_path / "expanded")(ids)
        assert logits.mean_divergence(wanted, logits.reference_logits(checkpoint)(ids)) < 1e-8
    assert logits.mean_divergence(wanted, logits.engine_logits(engine)(ids)) < 1e-3
