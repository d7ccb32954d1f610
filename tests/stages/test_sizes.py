"""Inputs of preprocessing that are too many, or too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.errors import InvalidArgument, PromptTooLong
from llmserve.stages.preprocess import Preprocessor
from llmserve.stages.stage_arrays import JSON_INPUTS, MAX_WORDS, MAX_WORDS_BYTES, prepare_arrays
from llmserve.stages.word_lists import MAX_COLUMNS, unpack_word_list
from tests.tiny_tokenizers import write_byte_level_tokenizer


@pytest.fixture
def stage(tmp_path: Path) -> Preprocessor:
    write_byte_level_tokenizer(tmp_path, 400)
    (tmp_path / "config.json").write_text('{"build_config": {"max_seq_len": 64}}')
    return Preprocessor.open(tmp_path)


def texts(*values: bytes) -> Any:
    return np.array([values], object)


def prepare(stage: Preprocessor, **more: Any) -> None:
    prepare_arrays(stage, {"QUERY": texts(b"x"), "REQUEST_OUTPUT_LEN": np.array([[1]], np.int32)} | more)


@pytest.mark.parametrize("name", ["STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"])
def test_words(stage: Preprocessor, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} has {MAX_WORDS + 1} entries, more than {MAX_WORDS}"):
        prepare(stage, **{name: texts(*[b"x"] * (MAX_WORDS + 1))})
    with pytest.raises(InvalidArgument, match=f"{name} has {MAX_WORDS_BYTES + 1} bytes, more than {MAX_WORDS_BYTES}"):
        prepare(stage, **{name: texts(b"x", b"x" * MAX_WORDS_BYTES)})


def test_biases(stage: Preprocessor) -> None:
    ids, weights = np.zeros((1, 20_000), np.int32), np.zeros((1, 20_000), np.float32)
    with pytest.raises(InvalidArgument, match="LOGIT_BIAS_IDS has 20000 entries, more than 16384"):
        prepare(stage, LOGIT_BIAS_IDS=ids, LOGIT_BIAS_WEIGHTS=weights)


@pytest.mark.parametrize("name", JSON_INPUTS)
def test_texts_of_json(stage: Preprocessor, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} has {JSON_INPUTS[name] + 2} bytes, more than"):
        prepare(stage, **{name: texts(b"[%b]" % (b" " * JSON_INPUTS[name]))})


def test_messages_of_many_values(stage: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match=r"MESSAGES has .* JSON values, more than 262144"):
        prepare(stage, QUERY=texts(b""), MESSAGES=texts(b"[%b1]" % (b"{}," * 300_000)))


def test_a_prompt_and_messages_that_cannot_fit(stage: Preprocessor) -> None:
    for given in (
        {"QUERY": texts(b"x" * 100_000)},
        {"QUERY": texts(b""), "MESSAGES": texts(b'[{"role": "user", "content": "%b"}]' % (b"x" * 100_000))},
    ):
        with pytest.raises(PromptTooLong, match=r"the prompt is too long: it has at least .* takes at most 63"):
            prepare(stage, **given)
    prepare(stage)


def test_packed_words() -> None:
    with pytest.raises(InvalidArgument, match="stop_words_list has 65537 columns, more than 65536"):
        unpack_word_list(np.zeros((2, MAX_COLUMNS + 1), np.int32), "stop_words_list")
    with pytest.raises(InvalidArgument) as refused:
        unpack_word_list(np.full((2, MAX_COLUMNS), 7, np.int32), "stop_words_list")
    assert len(str(refused.value)) < 200
