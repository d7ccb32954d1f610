"""Calibration data: what is used of a file, and what is wrong with one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.calibration import text as calibration_text
from llmserve.builder.calibration.encoder import Encoder
from llmserve.builder.calibration.text import CalibrationText, read_calibration
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError, NotFound, RecipeError
from llmserve.stages.chat import Message
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from tests.checkpoints import make_checkpoint
from tests.gguf_files import make_gguf

VOCAB = 512
NO_FORMAT = "plain has no chat format: .* add chat_template.jinja, serve with --chat-template FILE, or send plain"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny", "baichuan2-7b")


@pytest.fixture
def encoder(folder: Path) -> Iterator[Encoder]:
    with Checkpoint.open(folder) as checkpoint:
        yield Encoder(checkpoint, VOCAB)


def written(path: Path, *lines: Any) -> Path:
    file = path / "data.jsonl"
    file.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return file


def read(path: Path, encoder: Encoder, *lines: Any) -> CalibrationText:
    return read_calibration(written(path, *lines), encoder, max_seq_len=256)


def test_text_messages_and_ids_become_what_an_engine_is_sent(folder: Path, encoder: Encoder, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "The river"}, {"role": "assistant", "content": "is wide"}]
    found = read(tmp_path, encoder, {"text": "The river"}, b"  ", {"messages": messages}, {"prompt_ids": [7, 5, 3]})
    served = Preprocessor.open(folder)
    dialogue = [Message(message["role"], message["content"]) for message in messages]
    assert found.texts == (
        served.prepare(TextPrompt(text="The river")).input_ids,
        served.prepare(TextPrompt(messages=dialogue)).input_ids,
        (7, 5, 3),
    )
    assert (found.num_lines, found.num_lines_used) == (3, 3)
    assert found.sha256 == hashlib.sha256((tmp_path / "data.jsonl").read_bytes()).hexdigest()
    assert found.facts.tokens == sum(map(len, found.texts))


def test_long_lines_are_read_in_parts_and_what_is_too_much_is_said(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_text, "MOST_TOKENS", 1000)
    lines = [{"prompt_ids": [i] * 300} for i in range(5)]
    found = read(tmp_path, encoder, *lines)
    assert list(map(len, found.texts)) == [256, 44, 256, 44, 256, 44, 100]
    assert (found.num_tokens, found.num_lines_used, found.num_lines) == (1000, 4, 5)
    assert found.notes[0] == ("calibration: the first 1,000 tokens are used (4 of 5 lines); the rest has no effect")
    assert "1,000 tokens are few" in found.notes[1]
    other = read(tmp_path, encoder, *lines[:4], {"prompt_ids": [9]})
    assert other.texts == found.texts
    assert other.sha256 != found.sha256, "what is not used is part of the file"


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    with Checkpoint.open(
        make_gguf(tmp_path / "m.gguf", "qwen3", stored="Q8_0", tokenizer="bpe", intermediate_size=192)
    ) as checkpoint:
        found = read(tmp_path, Encoder(checkpoint, 320), {"text": "The river is wide"})
    assert found.num_tokens > 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{'text': 1}", "line 2: not JSON"),
        (b"\xff\xfe", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
        (["text"], "line 2: it must be an object, found list"),
        ({}, "line 2: it must have one key, text, messages or prompt_ids, but has none"),
        ({"document": "a"}, "but has 'document'"),
        ({"text": "a", "messages": []}, "but has 'text', 'messages'"),
        ({"text": 7}, "line 2: text must be a string, found int"),
        ({"text": " \n"}, "line 2: text is empty"),
        ({"text": "\ud800"}, "lone surrogates"),
        ({"messages": []}, "line 2: messages is empty"),
        ({"messages": ["hello"]}, "message 0 must be an object with role and content"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "has role 'critic'"),
        ({"prompt_ids": []}, "line 2: prompt_ids is empty"),
        ({"prompt_ids": [1.0]}, "line 2: prompt_ids must be a list of token ids"),
        ({"prompt_ids": [True]}, "line 2: prompt_ids must be a list of token ids"),
        ({"prompt_ids": [3, VOCAB]}, "line 2: token id 512 is not one of the network's 512"),
        ({"prompt_ids": [-1]}, "line 2: token id -1 is not one"),
    ],
)
def test_what_is_wrong_with_a_line(encoder: Encoder, tmp_path: Path, line: Any, problem: str) -> None:
    with pytest.raises(RecipeError, match=r"data\.jsonl cannot be used") as caught:
        read(tmp_path, encoder, {"text": "a"}, line)
    assert problem in str(caught.value)


def test_all_problems_are_listed_up_to_a_number(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, encoder, {"texts": "a"}, {"text": "a"}, {"text": ""})
    assert "2 problems" in str(caught.value)
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, encoder, *[{"document": "a"}] * 10_000)
    assert "there may be more problems" in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_lines_that_are_not_used_are_checked_too(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_text, "MOST_TOKENS", 2)
    with pytest.raises(RecipeError, match="line 2: it must have one key"):
        read(tmp_path, encoder, {"prompt_ids": [1, 2, 3]}, {"id": 4})


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_nothing_in_a_file(encoder: Encoder, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(RecipeError, match="it has no line"):
        read_calibration(tmp_path / "data.jsonl", encoder, max_seq_len=256)


def test_files_that_cannot_be_read(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"calibration data .* does not exist"):
        read_calibration(tmp_path / "none", encoder, max_seq_len=256)
    with pytest.raises(RecipeError, match="cannot be read"):
        read_calibration(tmp_path, encoder, max_seq_len=256)


def test_a_checkpoint_without_a_tokenizer_or_a_chat_format(tmp_path: Path) -> None:
    with Checkpoint.open(make_checkpoint(tmp_path / "a", "llama", with_tokenizer=False)) as checkpoint:
        assert read(tmp_path, Encoder(checkpoint, 320), {"prompt_ids": [1]}).num_tokens == 1
        with pytest.raises(RecipeError, match=r"has no tokenizer .*; give prompt_ids") as caught:
            read(tmp_path, Encoder(checkpoint, 320), {"text": "a"}, {"text": "b"})
        assert "line 2" not in str(caught.value), "it is said once"
    plain = make_checkpoint(tmp_path / "plain", "llama")
    with Checkpoint.open(plain) as checkpoint, pytest.raises(RecipeError, match=NO_FORMAT):
        read(tmp_path, Encoder(checkpoint, 320), {"messages": [{"role": "user", "content": "a"}]})


def test_an_end_token_that_the_network_does_not_have_is_noted(tmp_path: Path) -> None:
    with Checkpoint.open(make_checkpoint(tmp_path / "a", "llama", eos_token_id=[2, 5000])) as checkpoint:
        assert Encoder(checkpoint, 320).notes() == [
            "eos_token_id 5000 is not one of the network's ids, 0 to 319: no answer ends with it"
        ]


def test_a_corrupt_tokenizer_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "a", "llama")
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).exists():
            (folder / name).write_text("{}")
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=f"{folder}/tokenizer.* copy it"):
        Encoder(checkpoint, 320).require_readable()
