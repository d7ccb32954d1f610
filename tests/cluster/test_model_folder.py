"""What a front end reads of a model: files, and a tokenizer.json that is the sentencepiece model's equal."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.cluster import model_folder, tokenizer_json
from llmserve.cluster.tokenizer_json import converted
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import AlreadyExists, CheckpointError, NotFound, Unsupported
from llmserve.stages.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import CHECKPOINT
from tests.tiny_tokenizers import SENTENCES


@pytest.mark.parametrize("kind", ["llama", "mistral", "baichuan2-7b"])
def test_a_tokenizer_json_is_the_models_equal(kind: str, tmp_path: Path) -> None:
    """With the space before a text and without."""
    checkpoint = make_checkpoint(tmp_path / "c", kind)
    made, own = converted(checkpoint), load_tokenizer(checkpoint)
    for text in (*SENTENCES, "x  y", "\u00e9\n\t\u4e16", ""):
        assert made.encode(text).ids == own.encode(text, add_special_tokens=True)
        assert made.decode(own.encode(text)) == own.decode(own.encode(text))


def test_a_tokenizer_json_has_the_tokens_added_to_the_model(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    size = load_tokenizer(checkpoint).vocab_size
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    listed = {"<tool>": False, "<end>": True}

    def write(first: int) -> None:
        tokens = {
            str(first + place): {"content": text, "special": special}
            for place, (text, special) in enumerate(listed.items())
        }
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": tokens}))

    write(size)
    made, own = converted(checkpoint), load_tokenizer(checkpoint)
    ids = own.encode("red<tool>fox<end>")
    assert made.encode("red<tool>fox<end>", add_special_tokens=False).ids == ids
    assert made.decode(ids) == own.decode(ids) == "red<tool> fox"
    write(size + 3)
    with pytest.raises(CheckpointError, match="'a<tool>' is"):
        converted(checkpoint)


def test_one_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    merges = tokenizer_json._merges
    monkeypatch.setattr(tokenizer_json, "_merges", lambda *given: merges(*given)[::-1])
    with pytest.raises(CheckpointError, match=r"differs from it in \d+ texts \(.* put one that comes"):
        converted(CHECKPOINT)


def test_another_kind_of_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "c", "llama")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, model_type="unigram", vocab_size=60, minloglevel=2
    )
    (checkpoint / "tokenizer.model").write_bytes(model.getvalue())
    with pytest.raises(Unsupported, match=r"is not a BPE model; put the checkpoint's tokenizer\.json"):
        converted(checkpoint)


def test_a_folder_tells_engines_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "folder_root", lambda: tmp_path / "models")
    checkpoint = make_checkpoint(tmp_path / "c", "baichuan2-7b")
    folders = []
    for dtype in ("float32", "float16"):
        build_engine(checkpoint, tmp_path / dtype, BuildOptions(dtype=dtype))
        directory = EngineDirectory.open(tmp_path / dtype)
        folder = model_folder.model_folder(directory)
        assert model_folder.model_folder(directory) == folder
        config = json.loads((folder / "config.json").read_text())
        assert config[model_folder.DIGEST] == directory.manifest.engine_digest
        assert config["model_type"] == "baichuan"
        assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("red fox").ids
        assert "raise_exception" in (folder / "chat_template.jinja").read_text()
        folders.append(folder)
    assert len(set(folders)) == 2
    assert sorted(each.name for each in (tmp_path / "models").iterdir()) == sorted(each.name for each in folders)


def test_the_same_weights_with_other_words_are_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer, or a template, is no part of an engine's digest."""
    monkeypatch.setattr(model_folder, "folder_root", lambda: tmp_path / "models")
    checkpoint = make_checkpoint(tmp_path / "c", "baichuan2-7b")
    build_engine(checkpoint, tmp_path / "e", BuildOptions())
    directory = EngineDirectory.open(tmp_path / "e")
    folders = [model_folder.model_folder(directory)]
    files = {"chat_template.json": '{"chat_template": "{{ 1 }}"}', "chat_template.jinja": "{{ messages }}"}
    for name, content in (files | {"generation_config.json": '{"top_k": 3}'}).items():
        (directory.path / name).write_text(content)
        folders.append(model_folder.model_folder(directory))
    assert len(set(folders)) == 4
    assert (folders[1] / "chat_template.jinja").read_text() == "{{ 1 }}"
    assert (folders[-1] / "chat_template.jinja").read_text() == "{{ messages }}"


@pytest.mark.parametrize("kind", ["a link", "a file", "open to others"])
def test_a_place_that_others_may_have_made_is_not_believed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where everybody may write."""
    place = tmp_path / "models"
    monkeypatch.setattr(model_folder, "folder_root", lambda: place)
    checkpoint = make_checkpoint(tmp_path / "c", "baichuan2-7b")
    build_engine(checkpoint, tmp_path / "e", BuildOptions())
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        place.write_text("")
    else:
        place.mkdir()
        place.chmod(0o777)
    with pytest.raises(AlreadyExists, match="belongs to other users too"):
        model_folder.model_folder(EngineDirectory.open(tmp_path / "e"))


def test_an_engine_without_a_tokenizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "folder_root", lambda: tmp_path / "models")
    checkpoint = make_checkpoint(tmp_path / "c", "baichuan2-7b", with_tokenizer=False)
    build_engine(checkpoint, tmp_path / "e", BuildOptions())
    with pytest.raises(NotFound, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        model_folder.model_folder(EngineDirectory.open(tmp_path / "e"))
    assert list((tmp_path / "models").iterdir()) == []
