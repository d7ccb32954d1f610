"""`llmserve eval` on a tiny engine: the real engine, the real baseline, exit codes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cli import eval as eval_command
from llmserve.cli.app import app
from llmserve.engine.directory.artifact import EngineDirectory, hash_file
from llmserve.engine.directory.gate_record import RECORDS_FILE, GateRule, GateSubject, gate_problems, records_of
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, ResourceExhausted, Unavailable, Unsupported
from llmserve.evaluation.answers import Answer
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.candidates import CandidateRun
from llmserve.evaluation.judging.blessing import bless
from llmserve.evaluation.reporting.record import add_record
from llmserve.evaluation.run import EvalOptions, candidate_side, evaluate
from llmserve.evaluation.suite import load_suite
from llmserve.sealed_log import Verifier
from tests.checkpoints import make_checkpoint
from tests.evaluation.served.defects import command
from tests.evaluation.suites import write_choice_suite, write_suite
from tests.gguf_files import make_gguf
from tests.quantized_files import METHODS, make_quantized
from tests.test_sealed_log import new_key

OPTIONS = BuildOptions(dtype="float32", max_num_tokens=128, max_seq_len=128, tokens_per_block=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eval") / "tiny", "baichuan2-7b")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Path:
    build_engine(checkpoint, checkpoint.parent / "engine", OPTIONS)
    return checkpoint.parent / "engine"


@pytest.fixture(scope="module")
def damaged(checkpoint: Path) -> Path:
    """Built from the same checkpoint with one layer's output projection negated."""
    folder = shutil.copytree(checkpoint, checkpoint.parent / "damaged")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= -1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    build_engine(folder, checkpoint.parent / "damaged-engine", OPTIONS)
    return checkpoint.parent / "damaged-engine"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Every word counts: the model babbles, so the data's references are useless, but its own answers will do."""
    return write_suite(tmp_path / "suite", margins={"rougeL": 2.0, "rouge1": 2.0})


def run(*arguments: str | Path) -> Result:
    """Without servers: quicker."""
    return run_served(*arguments, "--no-as-served")


def run_served(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(eval_command.command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_py(*arguments: object) -> Result:
    """A command line as it is typed, old flags and all."""
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_the_command_line_of_summarize_py(checkpoint: Path, engine: Path, suite: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = "--test_hf --test_trt_llm --data_type fp32 --max_ite 4 --batch_size 2 --output_len 100 --check_accuracy"
    common = ("--hf_model_dir", checkpoint, "--engine_dir", engine, "--suite", suite, "--no-as-served", *flags.split())
    done = run_py(*common, "--tensorrt_llm_rouge1_threshold=-1", "--output", report, "--no-record")
    told = json.loads(report.read_text())
    assert done.exit_code == (0 if told["passed"] else 1), done.output
    assert len(told["samples"]) == 8
    lines = done.output.splitlines()
    for name, side in (("TensorRT-LLM", "engine"), ("HF", "baseline")):
        at = lines.index(f"{name} beam 0 result")
        assert "(total latency: " in lines[at - 1]
        shown = dict(line.strip().split(" : ") for line in lines[at + 1 : at + 5])
        assert list(shown) == ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        assert float(shown["rougeL"]) == pytest.approx(told["metrics"]["rougeL"][side], abs=0.01)
    below = run_py(*common, "--tensorrt_llm_rouge1_threshold", "101", "--output", report, "--no-record")
    assert below.exit_code == 1
    assert "and must be above 101" in below.output


def test_summarize_pys_own_data_is_a_suite_of_the_project(
    checkpoint: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_py("--test_trt_llm", "--hf_model_dir", checkpoint, "--engine_dir", engine)
    assert isinstance(done.exception, NotFound)
    assert "no suite file eval/suites/cnn_dailymail.yaml; give one with --suite" in str(done.exception)
    assert (Path(__file__).parents[2] / "eval/suites/cnn_dailymail.yaml").is_file()


def answers_as_references(suite: Path, report: Path) -> None:
    """Make the baseline's own answers the expected texts, so that ROUGE sees every change; more can be lost then."""
    suite.write_text(suite.read_text().replace("2.0", "10.0"))
    rows = [json.loads(line) for line in (suite.parent / "rows.jsonl").read_text().splitlines()]
    samples = json.loads(report.read_text())["samples"]
    for row, sample in zip(rows, samples, strict=True):
        row["summary"] = "answer " + "".join(
            c if c.isascii() and c.isalnum() else " " for c in sample["baseline"]["text"]
        )
    (suite.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_that_the_engine_has_no_room_for_are_refused_before_any_is_computed(
    checkpoint: Path, engine: Path, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path, max_tokens=OPTIONS.max_seq_len)
    refused = run(engine, "--hf-model-dir", checkpoint, "--suite", suite)
    assert isinstance(refused.exception, InvalidArgument)
    words = "32 of 32 prompts with their answers exceed the 128 tokens that engine takes"
    assert words in str(refused.exception)
    assert not (tmp_path / "baselines").exists()


def test_a_good_engine_passes_and_a_damaged_one_fails(
    checkpoint: Path, engine: Path, damaged: Path, suite: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    common = ("--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    first = run(engine, *common)
    assert first.exit_code == 0, first.output
    told = json.loads(report.read_text())
    assert told["parity"]["exact_match_rate"] == 1.0
    assert told["evidence"]["positions"] >= 32
    assert max(told["evidence"]["kl_of_samples"]) < 1e-5
    answers_as_references(suite, report)

    good = run(engine, *common)
    assert good.exit_code == 0, good.output
    assert "PASS" in good.output
    assert str(report) in good.output.replace("\n", "")
    assert json.loads(report.read_text())["parity"]["exact_match_rate"] == 1.0
    assert len(list((suite.parent / "baselines").glob("*-float32.json"))) == 2  # of the first and of the changed data

    bad = run(damaged, *common)
    assert bad.exit_code == 1, bad.output
    assert "FAIL" in bad.output
    assert json.loads(report.read_text())["verdict"] == "fail"
    verdicts = {True: engine, False: damaged}
    for passed, folder in verdicts.items():
        last = records_of(EngineDirectory.open(folder))[-1]
        assert (last.passed, last.suite) == (passed, json.loads(report.read_text())["suite"]["name"])


def test_a_server_that_is_not_there_costs_no_baseline(checkpoint: Path, suite: Path) -> None:
    done = run("--url", "127.0.0.1:1", "--hf-model-dir", checkpoint, "--suite", suite)
    assert isinstance(done.exception, Unavailable)
    assert not (suite.parent / "baselines").exists()


def test_an_engine_may_be_compared_with_another(checkpoint: Path, engine: Path, damaged: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite", margins=None, loss_margins={"float": {"kl": 0.001, "flip": 0.1}})
    report = tmp_path / "report.json"
    num_records = [len(records_of(EngineDirectory.open(folder))) for folder in (engine, damaged)]
    same = run(engine, "--baseline", engine, "--suite", suite, "--output", report)
    assert same.exit_code == 0, same.output
    told = json.loads(report.read_text())
    assert told["baseline"]["engine_digest"] == told["engine"]["engine_digest"]
    assert told["evidence"]["kl_of_samples"] == [0.0] * len(told["samples"])
    assert told["evidence"]["positions"] >= 32
    other = run(damaged, "--baseline", engine, "--suite", suite, "--output", report)
    assert other.exit_code == 1, other.output
    assert json.loads(report.read_text())["evidence"]["losses"]["kl"]["value"] > 0.001
    assert "baseline: engine, float32, 8 requests in flight, an engine, in this run" in other.output
    assert [len(records_of(EngineDirectory.open(folder))) for folder in (engine, damaged)] == num_records


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give the checkpoint with --hf-model-dir, or another engine with --baseline"),
        (("--baseline", "here", "--hf-model-dir", "there"), "both select a baseline; give only one of them"),
        (("--baseline", "here", "--dtype", "float16"), "are for a Hugging Face model; leave them out"),
        (("--baseline", "here", "--sign-key", "key"), "--sign-key signs a record"),
        (("--baseline", "nowhere"), "nowhere"),
    ],
)
def test_there_is_one_baseline(arguments: tuple[str, ...], words: str, engine: Path, suite: Path) -> None:
    done = run(engine, "--suite", suite, *arguments)
    assert isinstance(done.exception, LlmserveError)
    assert words in str(done.exception)


def test_what_is_wrong_only_among_others_fails_as_it_is_served(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report, "--served-samples", "12")
    good = run_served(*arguments)
    assert good.exit_code == 0, good.output
    monkeypatch.setattr(eval_command, "SERVE", command("swap_blocks()"))
    bad = run_served(*arguments)
    assert bad.exit_code == 1, bad.output
    assert "FAIL: as served, " in bad.output
    conditions = json.loads(report.read_text())["served"]["conditions"]
    different = {name for name, found in conditions.items() if found["differences"]}
    assert different  # by which of them depends on which requests met
    assert "alone" not in different
    passed, failed = records_of(EngineDirectory.open(engine))[-2:]
    assert (passed.passed, failed.passed) == (True, False)
    assert {name for name, kept in failed.line.content["served"].items() if kept["verdict"] == "fail"} == different


def test_a_damaged_layer_fails_by_the_evidence_alone(
    checkpoint: Path, engine: Path, damaged: Path, tmp_path: Path
) -> None:
    """The model babbles, so no reference fits and ROUGE sees nothing."""
    suite = write_suite(tmp_path / "suite", margins=None, loss_margins={"float": {"kl": 0.001, "flip": 0.1}})
    report = tmp_path / "report.json"
    common = ("--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    good = run(engine, *common)
    assert good.exit_code == 0, good.output
    assert "PASS: the engine loses no more than the suite allows (KL, flip)" in good.output
    bad = run(damaged, *common)
    assert bad.exit_code == 1, bad.output
    losses = json.loads(report.read_text())["evidence"]["losses"]
    assert losses["kl"]["verdict"] == "fail"
    assert losses["kl"]["low"] > 0.01


def test_a_run_leaves_a_record_that_counts_once_the_margins_are_blessed(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(engine, tmp_path / "engine", ignore=shutil.ignore_patterns(RECORDS_FILE))
    report = tmp_path / "report.json"
    arguments = (mine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    directory = EngineDirectory.open(mine)
    run(*arguments, "--no-record")
    assert records_of(directory) == []
    done = run(*arguments)
    assert "record: tiny: passed, of a suite that is not blessed" in done.output
    assert "nobody has blessed it" in gate_problems(GateSubject.engine(directory), GateRule(("tiny",)))[0]

    bless(suite, load_suite(suite), by="ann", why="first release")
    assert run(*arguments, "--num-samples", "3").exit_code == 1
    assert "nobody has blessed it" in gate_problems(GateSubject.engine(directory), GateRule(("tiny",)))[0]
    assert run(*arguments).exit_code == 0
    assert gate_problems(GateSubject.engine(directory), GateRule(("tiny",))) == []
    *_, last = records_of(directory)
    content = last.line.content
    assert content["report_sha256"] == hash_file(report)
    assert content["suite"]["rules"] == load_suite(suite).rules()
    assert content["losses"].keys() >= {"kl", "flip"}
    assert len(records_of(directory)) == 3


def test_a_record_is_signed_where_there_is_a_key(checkpoint: Path, engine: Path, suite: Path, tmp_path: Path) -> None:
    private, public = new_key(tmp_path)
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", tmp_path / "report.json")
    assert run(*arguments, "--sign-key", private).exit_code == 0
    assert Verifier.load(public).problem(records_of(EngineDirectory.open(engine))[-1].line) == ""
    for without in (("--no-record",), ("--url", "localhost:1")):
        refused = run(*arguments, "--sign-key", private, *without).exception
        assert isinstance(refused, InvalidArgument)
        assert "--sign-key signs a record" in str(refused)
    assert "cannot be read" in str(run(*arguments, "--sign-key", tmp_path / "no.pem").exception)


def test_an_engine_that_changed_during_the_run_gets_no_record(
    checkpoint: Path, engine: Path, damaged: Path, suite: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    report = evaluate(EvalOptions(suite, checkpoint, engine=engine), Silent())
    report.save(path)
    with pytest.raises(InvalidArgument, match="changed during the run"):
        add_record(damaged, suite, report, path)
    assert all(record.time for record in records_of(EngineDirectory.open(damaged)))


class Silent:
    """A watcher that looks away."""

    def phase(self, name: str, total: int) -> Callable[[int], None]:
        return lambda count: None


def test_a_stored_baseline_needs_no_torch(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", tmp_path / "report.json")
    with monkeypatch.context() as without_torch:
        without_torch.setattr(hf, "is_available", lambda: False)
        assert isinstance(run(*arguments).exception, Unsupported)
    assert "computed in this run" in run(*arguments).output
    monkeypatch.setattr(hf, "is_available", lambda: False)
    stored = run(*arguments, "--num-samples", "3")
    assert stored.exit_code == 1, stored.output
    assert "FAIL (inconclusive)" in stored.output
    assert "stored, computed on" in stored.output
    assert "3 samples" in stored.output
    refreshed = run(*arguments, "--refresh-baseline").exception
    assert isinstance(refreshed, Unsupported)
    assert "cannot be computed: torch and transformers are not installed" in str(refreshed)


def test_refreshing_repairs_a_damaged_baseline_and_drops_nothing(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path
) -> None:
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", tmp_path / "report.json")
    run(*arguments)
    (stored,) = (suite.parent / "baselines").glob("*.json")
    good = json.loads(stored.read_text())

    stored.write_text("{}")
    assert "--refresh-baseline" in str(run(*arguments).exception)
    assert "computed in this run" in run(*arguments, "--refresh-baseline").output
    assert json.loads(stored.read_text())["answers"].keys() == good["answers"].keys()

    elsewhere = good | {"environment": good["environment"] | {"machine": "another"}}
    stored.write_text(json.dumps(elsewhere))
    refused = run(*arguments, "--refresh-baseline", "--num-samples", "2").exception
    assert isinstance(refused, InvalidArgument)
    assert "30 of its answers are not among the 2 requested samples" in str(refused)
    assert json.loads(stored.read_text()) == elsewhere


def test_the_report_names_the_checkpoint_that_the_engine_was_built_from(
    checkpoint: Path, engine: Path, damaged: Path, suite: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    common = ("--hf-model-dir", checkpoint, "--suite", suite, "--output", report, "--num-samples", "2")
    assert "another checkpoint" not in run(engine, *common).output
    sides = json.loads(report.read_text())
    assert sides["engine"]["checkpoint_digest"] == sides["baseline"]["checkpoint_digest"]
    assert "built from another checkpoint" in run(damaged, *common).output


def expanded_checkpoint(path: Path, kind: str) -> Path:
    if kind == "gguf":
        return make_gguf(path.with_suffix(".gguf"), "qwen2", stored="Q8_0", intermediate_size=192, tokenizer="bpe")
    make_quantized(path, METHODS[kind], "baichuan2-7b")
    return path


@pytest.mark.parametrize("kind", ["gguf", "gptq", "awq", "fp8-block"])
def test_the_baseline_of_rounded_numbers_is_what_they_stand_for(
    kind: str, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whatever the engine is in; nothing that was written out for it stays."""
    checkpoint = expanded_checkpoint(tmp_path / "rounded", kind)
    build_engine(checkpoint, tmp_path / "engine", replace(OPTIONS, dtype="bfloat16"))
    report = tmp_path / "report.json"
    arguments = (tmp_path / "engine", "--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # other tests write out theirs meanwhile
    computed = run(*arguments)
    assert "HF: float32, 1 request in flight, computed in this run" in computed.output
    assert list((tmp_path / "temporary").glob("llmserve-expanded-*")) == []
    sides = json.loads(report.read_text())
    assert sides["engine"]["checkpoint_digest"] == sides["baseline"]["checkpoint_digest"]
    assert "stored, computed on" in run(*arguments).output

    build_engine(checkpoint, tmp_path / "engine", OPTIONS)
    run(*arguments)
    assert json.loads(report.read_text())["parity"]["exact_match_rate"] == 1.0


def test_a_baseline_that_does_not_fit_the_disk(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = expanded_checkpoint(tmp_path / "rounded", "gptq")
    build_engine(checkpoint, tmp_path / "engine", OPTIONS)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 10))
    failed = run(tmp_path / "engine", "--hf-model-dir", checkpoint, "--suite", suite).exception
    assert isinstance(failed, ResourceExhausted)
    assert "in float32 needs 0.0 GiB" in str(failed)
    assert "TMPDIR" in str(failed)


def test_choices_pass_by_likelihood_and_a_damaged_engine_fails(
    checkpoint: Path, engine: Path, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model babbles, so the likeliest choice is made the right one: whatever moves it is a loss."""
    suite, report = write_choice_suite(tmp_path / "suite"), tmp_path / "report.json"
    common = ("--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    run(engine, *common)
    data = suite.parent / "choices.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for row, sample in zip(rows, json.loads(report.read_text())["samples"], strict=True):
        row["answer"] = sample["baseline"]["text"]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    good = run(engine, *common)
    assert good.exit_code == 0, good.output
    assert "acc: right answers lost 0, gained 0 (McNemar's p 1)" in good.output
    told = json.loads(report.read_text())
    assert told["metrics"]["acc"]["engine"] == 100.0
    for sample in told["samples"]:
        both = [sample[side]["log_likelihoods"] for side in ("baseline", "engine")]
        assert both[0] == pytest.approx(both[1], abs=1e-3)
    monkeypatch.setattr(hf, "is_available", lambda: False)  # what is stored is enough
    bad = run(damaged, *common)
    assert bad.exit_code == 1, bad.output
    flips = json.loads(report.read_text())["metrics"]["acc"]["flips"]
    assert (flips["lost"] >= 4, flips["gained"]) == (True, 0)
    assert json.loads(report.read_text())["verdict"] != "pass"
    against = ("--baseline", engine, "--suite", suite, "--output", report)
    assert run(damaged, *against).exit_code == 1
    assert json.loads(report.read_text())["metrics"]["acc"]["flips"] == flips
    assert run(engine, *against).exit_code == 0


def test_an_engine_with_another_tokenizer_weighs_other_choices(
    checkpoint: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed to find that out."""
    monkeypatch.delattr("llmserve.evaluation.run.compute_choices")
    monkeypatch.delattr("llmserve.evaluation.run.engine_baseline")
    other = make_checkpoint(tmp_path / "other", "baichuan2-7b", vocab_size=560)
    build_engine(other, tmp_path / "engine", OPTIONS)
    suite = write_choice_suite(tmp_path / "suite")
    arguments = (tmp_path / "engine", "--hf-model-dir", checkpoint, "--suite", suite)
    assert "the engine and the baseline get different prompts" in str(run(*arguments).exception)
    against = (engine, "--baseline", tmp_path / "engine", "--suite", suite)
    assert "the engine and the baseline get different prompts" in str(run(*against).exception)


def test_a_plan_runs_nothing(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.json"
    common = ("--hf-model-dir", checkpoint, "--suite", suite)
    nothing = run("--plan", *common, "--dtype", "float32").exception
    assert isinstance(nothing, NotFound)
    assert "no float32 baseline of these samples is stored" in str(nothing)
    run(engine, *common, "--output", report)
    monkeypatch.setattr(hf, "is_available", lambda: False)
    records = len(records_of(EngineDirectory.open(engine)))
    bound = run(engine, *common, "--plan")
    assert bound.exit_code == 0, bound.output
    assert "spread: the stored baseline" in bound.output
    known = run(*common, "--plan", "--earlier", report)
    assert known.exit_code == 0, known.output
    assert "spread: the differences of 32 samples" in known.output
    assert "enough for every margin" in known.output
    assert len(records_of(EngineDirectory.open(engine))) == records
    assert "--plan" in str(run(engine, *common, "--earlier", report).exception)
    assert "--num-samples must be at least 1" in str(run(*common, "--plan", "--num-samples", "0").exception)


def test_structured_output_is_asked_of_the_engine_only(checkpoint: Path, engine: Path, tmp_path: Path) -> None:
    """A network that babbles writes no JSON, and nothing else when it is held to it."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    report = tmp_path / "report.json"
    changes: dict[str, object] = {
        "metrics": ["json_valid"], "margins": None, "floors": {"json_valid": 100}, "max_tokens": 60
    }  # fmt: skip
    found = {}
    for structured in (False, True):
        suite = write_suite(tmp_path / "suite", json_schema=schema, structured_output=structured, **changes)
        done = run(engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
        found[structured] = json.loads(report.read_text())["metrics"]["json_valid"]
        assert done.exit_code == (0 if structured else 1), done.output
    assert (found[False]["baseline"], found[False]["engine"]) == (0.0, 0.0)
    assert (found[True]["baseline"], found[True]["engine"]) == (0.0, 100.0)
    assert len(list((tmp_path / "suite" / "baselines").iterdir())) == 1  # one baseline for both


class Interrupted(Exception):
    """As Ctrl-C, which asyncio would complain about."""


class Interrupting:
    """A watcher that interrupts a phase after so many samples."""

    def __init__(self, phase: str, after: int) -> None:
        self.stops = (phase, after)

    def phase(self, name: str, total: int) -> Callable[[int], None]:
        done = 0

        def progress(count: int) -> None:
            nonlocal done
            done += count
            if (name, done) == self.stops:
                raise Interrupted

        return progress


@pytest.mark.parametrize(("phase", "after"), [("engine", 20), ("evidence", 10)])
def test_an_interrupted_run_goes_on_and_says_the_same(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path, phase: str, after: int
) -> None:
    report, partial = tmp_path / "report.json", tmp_path / "report.partial.jsonl"
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    run(*arguments)
    run(*arguments)  # beside a stored baseline, as the run that goes on
    whole = json.loads(report.read_text())
    assert not partial.exists()
    options = EvalOptions(suite, checkpoint, engine=engine, kept_answers=partial)
    with pytest.raises(Interrupted):
        evaluate(options, Interrupting(phase, after))
    done = run(*arguments)
    assert "of 32 answers come from before an interruption" in done.output
    assert not partial.exists()
    told = json.loads(report.read_text())
    num_kept = int(told["engine"].pop("kept_answers"))
    assert after - 1 <= num_kept < 31 if phase == "engine" else num_kept == 31
    for content in (whole, told):
        for sample in content["samples"]:
            del sample["engine"]["seconds"]
        for name in ("latency_seconds", "tokens_per_second"):
            assert content["engine"].pop(name)
        content["engine"].pop("drafts", None)
    assert told == whole


@pytest.mark.parametrize("refresh", [(), ("--refresh-baseline",)])
def test_an_interrupted_baseline_goes_on_and_says_the_same(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refresh: tuple[str]
) -> None:
    report, baselines = tmp_path / "report.json", suite.parent / "baselines"
    arguments = (engine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report, "--no-record")
    run(*arguments)
    whole = json.loads(report.read_text())["samples"]
    (stored,) = baselines.iterdir()
    if not refresh:
        stored.unlink()
    before = {path: path.read_bytes() for path in baselines.iterdir()}
    with pytest.raises(Interrupted):
        evaluate(EvalOptions(suite, checkpoint, engine=engine, refresh_baseline=True), Interrupting("Hugging Face", 20))
    assert {path: path.read_bytes() for path in baselines.glob("*.json")} == before
    asked = list[int]()
    generate = hf.HfModel.generate

    def counted(model: hf.HfModel, ids: Sequence[Sequence[int]], **options: Any) -> list[hf.HfAnswer]:
        asked.append(len(ids))
        return generate(model, ids, **options)

    monkeypatch.setattr(hf.HfModel, "generate", counted)
    done = run(*arguments, *refresh)
    assert "computed in this run" in done.output
    assert sum(asked) == 1 + 12  # one to warm up
    told = json.loads(report.read_text())["samples"]
    for sample in (*whole, *told):
        del sample["engine"]["seconds"], sample["baseline"]["seconds"]
    assert told == whole
    assert list(baselines.iterdir()) == [stored]


def test_answers_of_an_engine_that_changed_are_not_used(
    checkpoint: Path, engine: Path, suite: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(engine, tmp_path / "engine")
    report, partial = tmp_path / "report.json", tmp_path / "report.partial.jsonl"
    arguments = (mine, "--hf-model-dir", checkpoint, "--suite", suite, "--output", report)
    options = EvalOptions(suite, checkpoint, engine=mine, kept_answers=partial)
    run(*arguments)

    def interrupted() -> None:
        with pytest.raises(Interrupted):
            evaluate(options, Interrupting("engine", 20))

    interrupted()
    content = (mine / "rank0.engine").read_bytes()
    (mine / "rank0.engine").write_bytes(
        content
    )  # the same bytes, for all that anybody knows not the ones that answered
    assert "before an interruption" not in run(*arguments).output
    interrupted()
    assert "before an interruption" not in run(*arguments, "--concurrency", "2").output
    interrupted()
    assert "before an interruption" not in run(*arguments, "--num-samples", "31").output
    interrupted()
    assert "before an interruption" in run(*arguments).output


def test_a_server_is_not_given_the_local_engines_facts(engine: Path, suite: Path) -> None:
    options = EvalOptions(suite, engine, engine=engine, url="localhost:8001")
    answer = Answer("a", 1, 1, 0.5)
    side = candidate_side(EngineDirectory.open(engine), options, CandidateRun([answer], 1.0))
    assert side.facts.keys() == {"name", "url", "in_flight", "machine"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), InvalidArgument, "give an engine directory, or --url"),
        (("nowhere",), NotFound, "no engine directory nowhere"),
        (("ENGINE", "--num-samples", "0"), InvalidArgument, "--num-samples must be at least 1"),
        (("ENGINE", "--num-samples", "33"), InvalidArgument, "33 samples are requested, but the data has 32"),
        (("ENGINE", "--dtype", "int3"), InvalidArgument, "--dtype must be one of float16, bfloat16, float32"),
        (("ENGINE", "--suite", "none.yaml"), NotFound, "no suite file none.yaml"),
        (("ENGINE", "--hf-model-dir", "none"), NotFound, "none"),
        (("ENGINE", "--output", "/proc"), InvalidArgument, "/proc cannot be written: Is a directory"),
    ],
)
def test_bad_input(
    checkpoint: Path, engine: Path, suite: Path, arguments: tuple[str, ...], error: type[Exception], message: str
) -> None:
    given = [str(engine) if argument == "ENGINE" else argument for argument in arguments]
    defaults = [
        item
        for name, value in (("--hf-model-dir", checkpoint), ("--suite", suite))
        if name not in given
        for item in (name, value)
    ]
    result = run(*given, *defaults)
    assert isinstance(result.exception, error), result.exception
    assert message in str(result.exception)
