"""Prompt ids beside transformers' own: stages that err are seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llmserve.evaluation.answers import Sample
from llmserve.evaluation.baseline.prompt_ids import PromptIds, second_opinion
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.stages.bpe_tokenizer import JsonTokenizer
from llmserve.stages.chat import Message
from tests.tiny_tokenizers import sentencepiece_model, write_byte_level_tokenizer

SAMPLES = [
    Sample("text", "the fox <|im_end|> runs", "x"),
    Sample("chat", (Message("system", "Be kind."), Message("user", "runs over")), "x"),
    Sample("choice", "the hill ", "a", ("a", "b")),
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    write_byte_level_tokenizer(tmp_path, 400)
    return tmp_path


def opinion(texts: Path, samples: list[Sample] = SAMPLES) -> PromptIds:
    return second_opinion(texts, samples, PromptEncoder(texts, 8).encode_samples(samples))


def test_the_stages_agree_with_transformers(texts: Path) -> None:
    found = opinion(texts)
    assert (found.is_judged, found.verdict) == (True, Verdict.PASS)
    assert str(found) == "0 of 3 prompts have token ids that differ from transformers'"


def test_a_stage_that_loses_a_space_fails(texts: Path) -> None:
    sound = JsonTokenizer.encode

    def without_spaces(self: JsonTokenizer, text: str, **more: Any) -> list[int]:
        return sound(self, text.replace("fox ", "fox"), **more)

    with patch.object(JsonTokenizer, "encode", without_spaces):
        found = second_opinion(texts, SAMPLES[:1], [PromptEncoder(texts, 8).encode("the fox <|im_end|> runs")])
    assert found.verdict is Verdict.FAIL
    assert "1 of 1 prompts have token ids that differ from transformers': sample text at position" in found.reason
    assert "'<|im_end|>' (2) here, 'Ġ' (" in found.reason


def test_a_template_that_is_rendered_otherwise_fails(texts: Path) -> None:
    other = [Message("user", "runs  over")]
    found = second_opinion(texts, [SAMPLES[1]], [PromptEncoder(texts, 8).encode(tuple(other))])
    assert "sample chat at position" in found.reason


def test_where_there_is_nothing_to_compare_with_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(400, 3))
    found = opinion(tmp_path, SAMPLES[:1])
    assert (found.is_judged, str(found)) == (
        False,
        "not compared with transformers': the checkpoint has no tokenizer.json",
    )
