"""lm-evaluation-harness over the demo engine's server says what `llmserve eval` says of it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmserve.evaluation.judging.text_metrics import TextRules, score_texts
from tests.e2e.conftest import CHECKPOINT, ROOT, ServerProcess, llmserve
from tests.evaluation.test_text_metrics import REFERENCES, TEXTS
from tests.harness import HARNESS, needs_harness

pytestmark = needs_harness

NUM_SAMPLES = 12
DATA = ROOT / "eval" / "data"
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{document}}\nIn short:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": " ",
    "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
}
SUMMARIES = {
    "output_type": "generate_until",
    "doc_to_text": "Summarize:\n{{document}}",
    "doc_to_target": "{{summary}}",
    "generation_kwargs": {"until": [], "max_gen_toks": 32, "temperature": 0},
    "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
}


def harness(folder: Path, task: dict[str, Any], data: str, model: str, url: str, *flags: str) -> list[dict[str, Any]]:
    """The samples of a task on the first rows of a file, as the harness logs them."""
    rows = (DATA / data).read_text().splitlines()[:NUM_SAMPLES]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    source = {
        "task": "ours", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }  # fmt: skip
    (folder / "ours.yaml").write_text(yaml.safe_dump(source | task))
    done = subprocess.run(
        [
            HARNESS, "-m", "lm_eval", "--model", model, "--model_args", f"model=ensemble,base_url={url}",
            "--tasks", "ours", "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples",
            *flags,
        ],
        capture_output=True, text=True, timeout=280, env={**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (folder / "out").rglob("samples_ours_*.jsonl")
    return sorted(map(json.loads, log.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


def ours(folder: Path, server: ServerProcess, suite: dict[str, Any], data: str) -> list[dict[str, Any]]:
    """The same of `llmserve eval`."""
    common = {"name": "same", "data": {"path": str(DATA / data)}, "num_samples": NUM_SAMPLES, "baselines": "."}
    (folder / "suite.yaml").write_text(yaml.safe_dump(common | suite | {"inconclusive": "pass"}))
    arguments = ["--url", server.grpc, "--hf-model-dir", str(CHECKPOINT), "--suite", str(folder / "suite.yaml")]
    done = llmserve("eval", *arguments, "--output", str(folder / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    samples: list[dict[str, Any]] = json.loads((folder / "report.json").read_text())["samples"]
    return samples


def test_choices_are_as_likely_and_as_right(server: ServerProcess, tmp_path: Path) -> None:
    url = f"{server.http}/v1/completions"
    theirs = harness(tmp_path, CHOICES, "docstring-choices.jsonl", "local-completions", url, "--batch_size", "8")
    suite = {
        "columns": {"reference": "answer", "choices": "choices"}, "prompt": "{document}\nIn short: ",
        "margins": {"acc": 90, "acc_norm": 90, "acc_bytes": 90},
    }  # fmt: skip
    for expected, found in zip(theirs, ours(tmp_path, server, suite, "docstring-choices.jsonl"), strict=True):
        told = [float(answers[0][0]) for answers in expected["resps"]]
        assert found["engine"]["log_likelihoods"] == pytest.approx(told, abs=1e-3)
        assert found["engine"]["scores"] == {name: 100 * expected[name] for name in ("acc", "acc_norm", "acc_bytes")}


def test_answers_of_a_chat_are_the_same(server: ServerProcess, tmp_path: Path) -> None:
    url = f"{server.http}/v1/chat/completions"
    flags = ("--apply_chat_template", "--batch_size", "1")
    theirs = harness(tmp_path, SUMMARIES, "docstrings.jsonl", "local-chat-completions", url, *flags)
    suite = {
        "columns": {"reference": "summary"}, "messages": [{"role": "user", "content": "Summarize:\n{document}"}],
        "max_tokens": 32, "metrics": ["exact_match"], "floors": {"rougeL": 1},
    }  # fmt: skip
    for expected, found in zip(theirs, ours(tmp_path, server, suite, "docstrings.jsonl"), strict=True):
        assert expected["resps"][0][0].strip() == found["engine"]["text"].strip()
        assert found["engine"]["scores"]["exact_match"] == 100 * expected["exact_match"]


def test_exact_match_is_the_harness_own() -> None:
    program = (
        "import json, sys; from lm_eval.api.metrics import exact_match_hf_evaluate as match; "
        "flags = {'ignore_case': True, 'ignore_punctuation': True}; "
        "print([float(match([text], [right], **flags)['exact_match']) for text, right in json.load(sys.stdin)])"
    )
    pairs = json.dumps(list(zip(TEXTS, REFERENCES, strict=True)))
    done = subprocess.run(
        [HARNESS, "-c", program], input=pairs, capture_output=True, text=True, timeout=280, check=True
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    found = score_texts(["exact_match"], TEXTS, REFERENCES, TextRules())["exact_match"]
    assert [float(value) for value in found] == [100 * value for value in theirs]
    assert sum(theirs) == 1
