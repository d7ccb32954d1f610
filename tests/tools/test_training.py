"""Forty training steps of a very small model: it learns, it can be repeated, and others can load what is exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor

from llmserve.evaluation.baseline.hf import HfModel
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.stages.chat import Message
from tools.demo_checkpoint import batches, export, score, tokenizer, train
from tools.demo_checkpoint.corpus import Pair
from tools.demo_checkpoint.model import ModelConfig, TinyBaichuan

NOUNS = ("file", "socket", "database", "letter", "window", "archive", "stream", "buffer", "table", "record")
VERBS = ("open", "close", "read", "write", "copy", "move", "check", "print", "parse", "sort")
PAIRS = [
    Pair(
        "x", "p", f"The {noun} is located, then the method will {verb} the {noun} and report it.", f"{verb} the {noun}."
    )
    for noun in NOUNS
    for verb in VERBS
]
CONFIG = ModelConfig(vocab_size=520, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2)
OPTIONS = train.TrainOptions(steps=40, threads=1, tokens_per_batch=1024)


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    tokenizer.train_tokenizer(PAIRS, path, vocab_size=520)
    return path


@pytest.fixture(scope="module")
def processor(tokenizer_model: Path) -> SentencePieceProcessor:
    return tokenizer.load_tokenizer(tokenizer_model)


@pytest.fixture(scope="module")
def trained(processor: SentencePieceProcessor) -> tuple[TinyBaichuan, train.TrainReport]:
    examples = batches.encode_pairs(PAIRS * 4, processor)
    return train.train(examples, CONFIG, OPTIONS, say=lambda line: None)


@pytest.fixture(scope="module")
def checkpoint(
    trained: tuple[TinyBaichuan, train.TrainReport], tokenizer_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    export.export_checkpoint(trained[0], tokenizer_model, folder)
    return folder


def test_loss_goes_down(trained: tuple[TinyBaichuan, train.TrainReport]) -> None:
    report = trained[1]
    assert report.steps == 40
    assert report.first_loss > 5
    assert report.last_loss < report.first_loss - 1
    assert report.validation_loss < report.first_loss - 1


def test_training_drops_out_and_the_checkpoint_does_not(
    trained: tuple[TinyBaichuan, train.TrainReport], processor: SentencePieceProcessor, checkpoint: Path
) -> None:
    assert {module.p for module in trained[0].modules() if isinstance(module, torch.nn.Dropout)} == {0.05}
    examples = batches.encode_pairs(PAIRS, processor)
    options = replace(OPTIONS, steps=2)
    with_dropout, without = (
        train.train(examples, CONFIG, chosen, say=lambda line: None)[0]
        for chosen in (options, replace(options, dropout=0.0))
    )
    assert not torch.equal(with_dropout.lm_head.weight, without.lm_head.weight)
    assert score.load_checkpoint(checkpoint)[0].config.dropout == 0


def test_training_repeats_to_the_bit(processor: SentencePieceProcessor) -> None:
    examples = batches.encode_pairs(PAIRS, processor)
    options = replace(OPTIONS, steps=4)
    first, again = (train.train(examples, CONFIG, options, say=lambda line: None)[0] for _ in range(2))
    other, _ = train.train(examples, CONFIG, replace(options, seed=1), say=lambda line: None)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    processor: SentencePieceProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = batches.encode_pairs(PAIRS, processor)
    options = replace(OPTIONS, steps=5)
    wanted, _ = train.train(examples, CONFIG, options, say=lambda line: None)
    save = train._save

    def save_and_stop(*state: Any) -> None:
        save(*state)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "SAVE_EVERY", 3)
    monkeypatch.setattr(train, "_save", save_and_stop)
    resumable = replace(options, state=tmp_path / "state.pt")
    with pytest.raises(KeyboardInterrupt):
        train.train(examples, CONFIG, resumable, say=lambda line: None)
    found, report = train.train(examples, CONFIG, resumable, say=lambda line: None)
    assert report.steps == 5
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted.parameters(), strict=True))


def test_the_exported_checkpoint_gives_the_same_logits_elsewhere(
    trained: tuple[TinyBaichuan, train.TrainReport], checkpoint: Path
) -> None:
    ids = [195, *range(200, 240), 196, 300]
    with torch.no_grad():
        expected = trained[0](torch.tensor([ids]))[0].numpy()
    actual = HfModel(checkpoint, "float32").logits(ids)
    assert np.abs(actual - expected).max() < 2e-2 * np.abs(expected).max()  # the export rounds to float16


def test_the_exported_config_names_its_form(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["position_embedding"], config["norm_head"]) == ("rope", True)


def test_prompts_are_those_of_the_serving_side(checkpoint: Path, processor: SentencePieceProcessor) -> None:
    document = "Opens the file 42 times.\nThen closes it."
    served = PromptEncoder(checkpoint, 32).encode((Message("user", tokenizer.PROMPT + document),))
    assert list(served.input_ids) == tokenizer.prompt_ids(processor, document)
    assert served.end_id == tokenizer.EOS_ID


def test_scoring_generates_what_the_model_would(checkpoint: Path) -> None:
    model, processor = score.load_checkpoint(checkpoint)
    prompts = [tokenizer.prompt_ids(processor, pair.document) for pair in PAIRS[:2]]
    together = score.generate(model, prompts)
    assert together == [score.generate(model, [prompt])[0] for prompt in prompts]
    hf = HfModel(checkpoint, "float32")
    answers = hf.generate(prompts, max_tokens=score.MAX_NEW_TOKENS, end_ids=[tokenizer.EOS_ID], pad_id=0)
    assert together == [list(answer.token_ids) for answer in answers]
    texts = score.summaries(checkpoint, PAIRS[:2])
    assert texts == [processor.decode(ids) for ids in together]
    assert score.rouge([pair.summary for pair in PAIRS], PAIRS)["rougeL"] == pytest.approx(100)


def test_reserved_ids_are_baichuans(processor: SentencePieceProcessor) -> None:
    assert processor.id_to_piece(tokenizer.USER_ID) == "<reserved_106>"
    assert processor.id_to_piece(tokenizer.ASSISTANT_ID) == "<reserved_107>"
    assert processor.is_control(tokenizer.USER_ID)
    assert processor.decode(processor.encode("Opens 2024 files.\n\u2713")) == "Opens 2024 files.\n\u2713"


def test_batches_mark_every_answer_token_once(processor: SentencePieceProcessor) -> None:
    examples = batches.encode_pairs(PAIRS[:5], processor)
    batch = batches.make_batch(examples)
    assert batch.ids.shape == (5, 64)
    for row, example in enumerate(examples):
        answer = list(example.ids[example.prompt_length :])
        assert batch.targets[row][batch.is_answer[row]].tolist() == answer
        text = list(example.ids[1 : example.prompt_length])
        assert batch.targets[row][batch.is_text[row]].tolist() == text


def test_long_examples_are_left_out(processor: SentencePieceProcessor) -> None:
    long = replace(PAIRS[0], document="1 " * 200)
    assert len(batches.encode_pairs([PAIRS[0], long], processor)) == 1
