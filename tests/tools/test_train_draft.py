"""A draft engine's checkpoint is trained on an engine's answers, and drafts for that engine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.draft_engine import check_draft_engine
from tests.checkpoints import make_checkpoint
from tools.train_draft import app

OPTIONS = BuildOptions(dtype="float32", max_num_tokens=64, tokens_per_block=16)
PROMPTS = [f"{verb} the {noun}" for verb in ("open", "close") for noun in ("file", "door")] * 8  # those held out, too


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_layers_learn_what_the_network_answers(tmp_path: Path) -> None:
    checkpoint, engine = make_checkpoint(tmp_path / "checkpoint", "qwen2"), tmp_path / "engine"
    config = checkpoint / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    build_engine(checkpoint, engine, OPTIONS)
    answers, prompts, drafting = (tmp_path / name for name in ("answers.jsonl", "prompts.jsonl", "drafting"))
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))

    run("answers", engine, "--output", answers, "--prompts", prompts, "--tokens", "12", "--threads", "1")
    examples = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(examples) == len(PROMPTS)
    assert all(example["prompt"] and 1 <= len(example["answer"]) <= 12 for example in examples)

    said = run(
        "train", checkpoint, engine, answers, "--output", drafting, "--layers", "2", "--steps", "30", "--threads", "1"
    )
    before, after = map(float, re.findall(r": (\d\.\d+) of held-out tokens", said))
    assert after > before

    build_engine(drafting, tmp_path / "small", OPTIONS)
    options = replace(OPTIONS, given={"draft_vocabulary": str(drafting / "draft_vocabulary.jsonl")})
    build_engine(drafting, tmp_path / "few", options)
    answered = {token for line in answers.read_text().splitlines() for token in json.loads(line)["answer"]}
    drafted = EngineDirectory.open(tmp_path / "few").draft_vocabulary
    assert drafted is not None
    assert answered <= set(drafted.tolist())
    assert json.loads((drafting / "config.json").read_text())["num_hidden_layers"] == 1
    check_draft_engine(EngineDirectory.open(tmp_path / "small"), EngineDirectory.open(engine))
