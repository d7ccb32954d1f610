"""lm-evaluation-harness, unchanged, against this server: log-likelihoods by echo, and generated text."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmserve.engine.fake import fake_prompt_log_prob
from llmserve.stages.tokenizer import Tokenizer
from tests.frontends.server import RunningServer
from tests.frontends.text.conftest import VOCAB_SIZE, expected_text
from tests.harness import HARNESS, needs_harness

pytestmark = needs_harness

DOCUMENTS = [
    {"text": "The small red fox", "choices": [" runs", " over the hill"], "gold": 0},
    {"text": "over the", "choices": [" hill", " small red fox"], "gold": 1},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
target_delimiter: ""
output_type: {kind}
doc_to_text: "{{{{text}}}}"
{more}
"""
CHOICES = '''doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"'''
GENERATED = """doc_to_target: "{{text}}"
generation_kwargs: {until: ["never"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]"""


def samples(server: RunningServer, folder: Path, task: str) -> list[dict[str, Any]]:
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    (folder / "task.yaml").write_text(task)
    address = f"model=ensemble,base_url={server.http_url}/v1/completions,max_retries=1"
    done = subprocess.run(
        [
            HARNESS, "-m", "lm_eval", "--model", "local-completions", "--model_args", address, "--tasks", "toy",
            "--include_path", str(folder), "--batch_size", "2", "--output_path", str(folder / "out"), "--log_samples",
        ],
        capture_output=True, text=True, timeout=250, env={**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (folder / "out").rglob("samples_toy_*.jsonl")
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def test_log_likelihoods(served: RunningServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    task = TASK.format(name="toy", data=data, kind="multiple_choice", more=CHOICES)
    for document, sample in zip(DOCUMENTS, samples(served, tmp_path, task), strict=True):
        context = tokenizer.encode(str(document["text"]))
        for choice, answers in zip(document["choices"], sample["resps"], strict=True):  # type: ignore[call-overload]
            whole = tokenizer.encode(f"{document['text']}{choice}")
            expected = sum(
                fake_prompt_log_prob(whole[:n], whole[n], VOCAB_SIZE) for n in range(len(context), len(whole))
            )
            assert float(answers[0][0]) == pytest.approx(expected, abs=1e-5)


def test_generated_text(served: RunningServer, tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = tmp_path / "documents.jsonl"
    task = TASK.format(name="toy", data=data, kind="generate_until", more=GENERATED)
    for document, sample in zip(DOCUMENTS, samples(served, tmp_path, task), strict=True):
        assert sample["resps"] == [[expected_text(tokenizer, tokenizer.encode(str(document["text"])), 8)]]
