from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from llmserve.checkpoint.reader import Checkpoint
from llmserve.core import TopTokens
from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer
from llmserve.evaluation.baseline.folder import text_folder
from llmserve.evaluation.baseline.stored import (
    Baseline,
    BaselineKey,
    load_baseline,
    missing_baseline,
    replaceable_baseline,
    require_mergeable,
)
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.prompts import ids_digest, text_digest
from llmserve.stages.preprocess import PreparedPrompt
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

KEY = BaselineKey("a" * 64, "e" * 64, "b" * 64, "float16")
PROMPT, OTHER = PreparedPrompt((1, 2, 3), 2, 0), PreparedPrompt((1, 2, 4), 2, 0)
DECISIONS = tuple(Decision(token, -0.5, TopTokens((token, 1), (-0.5, -1.25))) for token in (7, 8, 2))
ANSWER = Answer("a \u2713", 3, 2, 0.25, (7, 8), DECISIONS, rounding=(1.25e-06, 0.0, 3.5))


def baseline(*prompts: PreparedPrompt, machine: str = "here") -> Baseline:
    answers = {digest: replace(ANSWER, prompt_digest=digest) for digest in map(ids_digest, prompts)}
    return Baseline(KEY, {"machine": machine, "batch_size": "1"}, answers)


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    path = baseline(PROMPT, OTHER).save(tmp_path / "new")
    assert path.name == f"{'a' * 16}-{'e' * 16}-{'b' * 16}-float16.json"
    loaded = load_baseline(tmp_path / "new", KEY)
    assert loaded == baseline(PROMPT, OTHER)
    assert loaded is not None
    selected = loaded.select([OTHER, PROMPT, OTHER])
    assert selected == [replace(ANSWER, prompt_digest=ids_digest(prompt)) for prompt in (OTHER, PROMPT, OTHER)]


def test_a_baseline_without_one_of_the_prompts_is_none() -> None:
    assert baseline(PROMPT).select([PROMPT, OTHER]) is None


def test_other_end_ids_find_nothing() -> None:
    """An answer goes on where another one ends: the same prompt with other end tokens is another question."""
    for changed in (replace(PROMPT, end_id=9), replace(PROMPT, stop_words=((9,),))):
        assert baseline(PROMPT).select([changed]) is None
    assert baseline(PROMPT).select([replace(PROMPT, stop_words=((9, 9),))])  # a phrase is no end token


def test_the_texts_of_a_gguf_file_lie_in_a_folder_of_its_name(tmp_path: Path) -> None:
    with Checkpoint.open(make_gguf(tmp_path / "tiny.gguf", "llama")) as checkpoint, text_folder(checkpoint) as folder:
        assert (folder.name, (folder / "config.json").is_file()) == ("tiny.gguf", True)


def test_text_files_have_a_digest_of_their_own(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "one", "baichuan2-7b")
    digest = text_digest(checkpoint)
    assert text_digest(shutil.copytree(checkpoint, tmp_path / "copy")) == digest
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    with_other_ends = text_digest(checkpoint)
    (checkpoint / "tokenizer.model").write_bytes((checkpoint / "tokenizer.model").read_bytes() + b" ")
    assert len({digest, with_other_ends, text_digest(checkpoint)}) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"checkpoint_digest": "c" * 64}, {"text_digest": "c" * 64}, {"suite_digest": "c" * 64}, {"dtype": "float32"},
    ],
)  # fmt: skip
def test_other_keys_find_nothing(tmp_path: Path, change: dict[str, str]) -> None:
    baseline(PROMPT).save(tmp_path)
    assert load_baseline(tmp_path, replace(KEY, **change)) is None


def test_a_file_that_lies_about_its_name_is_refused(tmp_path: Path) -> None:
    path = baseline(PROMPT).save(tmp_path)
    path.write_text(path.read_text().replace("a" * 64, "a" * 32 + "f" * 32))
    with pytest.raises(InvalidArgument, match="to another checkpoint"):
        load_baseline(tmp_path, KEY)


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"format": 3', '{"answers": {}, "environment": {}}'])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    baseline(PROMPT).save(tmp_path).write_text(damage)
    with pytest.raises(InvalidArgument, match="--refresh-baseline"):
        load_baseline(tmp_path, KEY)
    assert replaceable_baseline(tmp_path, KEY) is None


def test_a_file_of_an_older_version_can_be_replaced(tmp_path: Path) -> None:
    path = baseline(PROMPT).save(tmp_path)
    assert replaceable_baseline(tmp_path, KEY) == baseline(PROMPT)
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    with pytest.raises(InvalidArgument, match="--refresh-baseline"):
        load_baseline(tmp_path, KEY)
    assert replaceable_baseline(tmp_path, KEY) is None


def test_answers_of_another_environment_are_not_dropped() -> None:
    stored, here = baseline(PROMPT, OTHER, machine="there"), baseline().environment
    with pytest.raises(InvalidArgument, match=r"1 of its answers are not among the 1 requested samples"):
        require_mergeable(stored, [PROMPT], here)
    require_mergeable(stored, [PROMPT, OTHER], here)
    require_mergeable(stored, [PROMPT], stored.environment)
    require_mergeable(None, [PROMPT], here)


def test_a_shorter_run_keeps_the_other_answers_of_the_same_machine_only() -> None:
    assert set(baseline(PROMPT).merged_with(baseline(OTHER)).answers) == {ids_digest(PROMPT), ids_digest(OTHER)}
    assert set(baseline(PROMPT).merged_with(baseline(OTHER, machine="there")).answers) == {ids_digest(PROMPT)}
    assert baseline(PROMPT).merged_with(None) == baseline(PROMPT)


def test_a_missing_baseline_names_the_dtypes_that_are_stored(tmp_path: Path) -> None:
    baseline(PROMPT).save(tmp_path)
    error = missing_baseline(tmp_path, replace(KEY, dtype="bfloat16"))
    assert "no bfloat16 baseline" in str(error)
    assert "one is stored for float16: choose it with --dtype" in str(error)
    assert "pip install" in str(missing_baseline(tmp_path / "empty", KEY))
    assert "the stored float16 baseline lacks some of these samples" in str(missing_baseline(tmp_path, KEY))


def test_a_baseline_that_cannot_be_written_leaves_the_stored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline(PROMPT).save(tmp_path)

    def full(path: Path, text: str, **options: str) -> int:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InvalidArgument, match="No space left"):
        baseline(PROMPT, OTHER).save(tmp_path)
    assert load_baseline(tmp_path, KEY) == baseline(PROMPT)
    assert len(list(tmp_path.iterdir())) == 1
