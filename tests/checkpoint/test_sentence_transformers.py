"""What sentence-transformers' files say of a folder, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.sentence_transformers import prompt_notes, read_pooling
from llmserve.errors import CheckpointError
from llmserve.models.spec import Pooling
from tests.checkpoints import make_checkpoint, write_json
from tests.embedders import write_answers, write_sentence_transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, "llama", with_tokenizer=False)


def pooling_of(folder: Path, usual: Pooling | None = None) -> Pooling | None:
    with Checkpoint.open(folder) as checkpoint:
        return read_pooling(checkpoint, usual)


def problems_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        pooling_of(folder)
    return str(caught.value)


def modules(folder: Path, *kinds: tuple[str, str]) -> None:
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(listed))


def test_a_folder_without_these_files_is_what_its_config_says(folder: Path) -> None:
    assert pooling_of(folder) is None
    assert pooling_of(folder, Pooling("mean")) == Pooling("mean")


def test_newer_versions_name_the_activation_of_scores_in_a_file(folder: Path) -> None:
    """And list one module."""
    usual = Pooling("first", scores=True, sigmoid=True)
    modules(folder, ("", "Transformer"))
    assert pooling_of(folder, usual) == usual
    for kind, sigmoid in (("activation.Sigmoid", True), ("linear.Identity", False)):
        write_json(folder / "config_sentence_transformers.json", {"activation_fn": f"torch.nn.modules.{kind}"})
        assert pooling_of(folder, usual) == Pooling("first", scores=True, sigmoid=sigmoid)
    write_json(folder / "config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.activation.ReLU"})
    with pytest.raises(CheckpointError, match="ReLU of scores is not supported; supported: Sigmoid, Identity"):
        pooling_of(folder, usual)


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"default_prompt_name": "query"}, ["query: "]),
        ({"default_prompt_name": "document"}, []),
        ({"default_prompt_name": "other"}, []),
        ({"default_prompt_name": None}, []),
        ({"default_prompt_name": "query", "prompts": None}, []),
        ([], []),
    ],
)
def test_a_default_prompt_is_noted(settings: Any, noted: list[str], folder: Path) -> None:
    """With sentence-transformers 6.2: `encode(text)` has it, and `encode(text, prompt="")` is what an engine makes."""
    if isinstance(settings, dict):
        settings = {"prompts": {"query": "query: ", "document": ""}} | settings
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with Checkpoint.open(folder) as checkpoint:
        found = prompt_notes(checkpoint)
    assert len(found) == len(noted)
    assert all(repr(prompt) in note for prompt, note in zip(noted, found, strict=True))


@pytest.mark.parametrize(
    ("pooling", "mode"), [("cls", "first"), ("lasttoken", "last"), ("mean", "mean"), ("max", "max")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_that_of_the_files(folder: Path, pooling: str, mode: str, normalize: bool) -> None:
    write_sentence_transformers(folder, pooling, normalize=normalize)
    assert pooling_of(folder) == Pooling(mode, normalize=normalize)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": pooling})  # as newer versions write it
    assert pooling_of(folder) == Pooling(mode, normalize=normalize)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, r"['mean', 'cls']"),
        ({"pooling_mode_weightedmean_tokens": True}, "['weightedmean_tokens']"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "['mean_sqrt_len_tokens']"),
        ({"pooling_mode": "weightedmean"}, "'weightedmean'"),
        ({"pooling_mode": 3}, "3"),
        ({}, "[]"),
    ],
)
def test_another_pooling_is_refused_by_name(folder: Path, config: dict[str, Any], found: str) -> None:
    write_sentence_transformers(folder, "mean", normalize=False)
    write_json(folder / "1_Pooling" / "config.json", config)
    wanted = f"1_Pooling/config.json pools with {found}; supported: one of cls, lasttoken, mean, max"
    assert wanted in problems_of(folder)


def test_other_modules_are_refused_by_name(folder: Path) -> None:
    modules(folder, ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"))
    assert "modules Transformer, Pooling, Dense are not supported" in problems_of(folder)
    modules(folder, ("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"), ("3", "Normalize"))
    assert "are not supported" in problems_of(folder)


def test_a_text_in_small_letters_is_refused(folder: Path) -> None:
    write_sentence_transformers(folder, "mean", normalize=False)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256, "do_lower_case": True})
    assert "do_lower_case of sentence_bert_config.json is not supported" in problems_of(folder)


@pytest.mark.parametrize(
    "content",
    [
        "{}", "[1]", "[]", "null", '[{"type": "Transformer"}]', '[{"type": "Transformer", "path": "../elsewhere"}]',
        "[" * 100_000, "nothing",
    ],
)  # fmt: skip
def test_damaged_lists_are_refused(folder: Path, content: str) -> None:
    (folder / "modules.json").write_text(content)
    assert "modules.json" in problems_of(folder)


def test_a_pooling_without_its_file_is_refused(folder: Path) -> None:
    modules(folder, ("", "Transformer"), ("1_Pooling", "Pooling"))
    assert "1_Pooling/config.json is missing" in problems_of(folder)


def test_two_answers_must_be_tokens(folder: Path) -> None:
    write_answers(folder, yes=5, no=9)
    assert pooling_of(folder) == Pooling("last", scores=True, sigmoid=True, answers=(5, 9))
    for wrong in (-1, 320, True, "yes", None):
        write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": 5, "false_token_id": wrong})
        assert "must have true_token_id and false_token_id, ids of tokens in the vocabulary" in problems_of(folder)


def test_a_decoder_for_one_class_scores_texts(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    write_json(folder / "config.json", config | {"id2label": {"0": "LABEL_0"}})
    assert pooling_of(folder) == Pooling("last", scores=True, sigmoid=True)
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match="it has 2 labels"):
        pooling_of(folder)
