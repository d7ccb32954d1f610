from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import CheckpointError, InvalidArgument, NotFound
from llmserve.stages.bpe_tokenizer import JsonTokenizer
from llmserve.stages.files import resolve_path
from llmserve.stages.piece_tokenizer import PieceTokenizer
from llmserve.stages.text import text_from_bytes
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.stages.conftest import write_json

DEMO = Path(__file__).resolve().parents[2] / "build/checkpoints/baichuan2-tiny-docsum"


def test_a_tekken_file_alone_is_converted_by_transformers(tmp_path: Path) -> None:
    """As the error says."""
    from transformers import AutoTokenizer

    texts = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(text).decode()} for rank, text in enumerate(texts)]
    marks = [{"rank": i, "token_str": text} for i, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
    sizes = {"num_vocab_tokens": 260, "default_vocab_size": 264, "default_num_special_tokens": 4, "version": "v7"}
    content = {"config": {"pattern": r"\p{L}+|[^\p{L}]+", **sizes}, "vocab": vocab, "special_tokens": marks}
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    with pytest.raises(CheckpointError, match=r"AutoTokenizer\.from_pretrained\(.*\)\.save_pretrained"):
        load_tokenizer(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode_marked("[INST]hello") == [3, 263]


def test_the_demo_checkpoints_tokenizer() -> None:
    tokenizer = load_tokenizer(DEMO)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 0, 5120)
    ids = tokenizer.encode("Return 42 items: é", add_special_tokens=True)
    assert ids[0] != 1  # add_bos_token is false
    assert tokenizer.decode([195, *ids, 196, 2]) == "Return 42 items: é"
    assert tokenizer.decode([195, *ids], skip_special_tokens=False) == "Return 42 items: é"  # control: no spelling


def test_special_tokens_are_added_on_request_only(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    llama = tokenizers_by_kind["llama-slow"]
    assert llama.encode("fox", add_special_tokens=True) == [1, *llama.encode("fox")]


def test_role_tokens_have_no_spelling_in_text_and_others_have_none_where_one_is_banned(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    baichuan = tokenizers_by_kind["baichuan"]
    assert all(token > 196 for token in baichuan.encode("<reserved_195>"))
    assert all(token > 196 for token in baichuan.encode("<reserved_195></s>", banned=[195, 196]))


@pytest.mark.parametrize("kind", ["baichuan", "qwen", "llama-fast", "gemma", "metaspace"])
def test_special_tokens_in_a_text_are_read_as_transformers_does(
    kind: str, tokenizer_dirs: dict[str, Path], tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tokenizer_dirs[kind], trust_remote_code=False)
    for text in ("<s>the fox</s>runs", "a<unk>b", "<|im_start|>user\nfox<|im_end|>", "The é <s>é", "<eos> the fox"):
        assert tokenizers_by_kind[kind].encode(text, True) == theirs(text)["input_ids"], text


def test_json_special_tokens_are_read_from_text_unless_banned(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    qwen = tokenizers_by_kind["qwen"]
    assert qwen.encode("<|im_start|>") == [1]
    plain = qwen.encode("<|im_start|>", banned=[1])
    assert 1 not in plain
    assert qwen.decode(plain) == "<|im_start|>"
    assert qwen.encode("<|im_start|>") == [1]


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox")
    assert tokenizer.decode([*ids, -1, tokenizer.vocab_size + 7]) == tokenizer.decode(ids)


def test_json_wins_over_model_except_for_baichuan(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    shutil.copy(tokenizer_dirs["baichuan"] / "tokenizer.model", tmp_path)
    assert isinstance(load_tokenizer(tmp_path), JsonTokenizer)
    write_json(tmp_path, "tokenizer_config.json", tokenizer_class="BaichuanTokenizer")
    assert isinstance(load_tokenizer(tmp_path), PieceTokenizer)


def test_special_tokens_may_come_from_special_tokens_map(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    write_json(tmp_path, "special_tokens_map.json", eos_token={"content": "<|im_end|>"}, pad_token="<|endoftext|>")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 2, 0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model or tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(NotFound, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{}", b"\x00\xff garbage"])
def test_corrupt_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load_tokenizer(tmp_path)


def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((DEMO / "tokenizer.model").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="copy it again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_corrupt_config_is_named(tokenizer_dirs: dict[str, Path], tmp_path: Path, content: str) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_bytes_that_are_not_utf8_are_the_clients_mistake() -> None:
    assert text_from_bytes("é".encode(), "QUERY") == "é"
    with pytest.raises(InvalidArgument, match="QUERY is not valid UTF-8"):
        text_from_bytes(b"ab\xff", "QUERY")


def test_relative_paths_start_at_the_repositorys_parent_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = tmp_path / "repository/preprocessing"
    beside, here = tmp_path / "engines/one", tmp_path / "work/engines/two"
    for path in (model_dir, beside, here):
        path.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert resolve_path("engines/one", model_dir) == beside
    assert resolve_path("engines/two", model_dir) == here
    assert resolve_path("engines/three", model_dir) == tmp_path / "engines/three"
    assert resolve_path(str(here), model_dir) == here
    assert resolve_path("$$TRITON_MODEL_DIRECTORY/1/tokenizer", model_dir) == model_dir / "1/tokenizer"


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    text = "A fox, 42 é ☃ 𝄞"
    spelled = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    if tokenizer.decode(tokenizer.encode(text)) == text:  # not where the vocabulary loses characters
        assert spelled.decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""


def test_special_tokens_are_spelled_in_bytes(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    assert tokenizers_by_kind["qwen"].token_bytes(1) == b"<|im_start|>"
    assert tokenizers_by_kind["llama-slow"].token_bytes(1) == b"<s>"


TOOL, END = {"content": "<tool>", "special": False}, {"content": "<end>", "special": True}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"eos_token": "<end>"}, {"<end>": 400, "<tool>": 401}),
        ({"added_tokens_decoder": {"400": TOOL, "401": END}}, {}),
        ({"additional_special_tokens": ["<end>"]}, {"<end>": 400, "<tool>": 401}),
    ],
    ids=["added_tokens.json", "tokenizer_config.json", "additional_special_tokens"],
)
def test_tokens_added_to_a_model_are_those_of_transformers(
    config: dict[str, Any], added: dict[str, int], tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    shutil.copy(tokenizer_dirs["llama-slow"] / "tokenizer.model", tmp_path)
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    write_json(tmp_path, "tokenizer_config.json", **names | config)
    write_json(tmp_path, "added_tokens.json", **added)
    write_json(tmp_path, "config.json", model_type="llama")
    own, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (own.vocab_size, own.eos_id) == (len(theirs), theirs.eos_token_id)
    for text in ("the fox <tool> runs<end> over", "<tool>the fox", "the<tool><tool> the<end>"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert own.encode(text) == ids
        for skips in (True, False):
            assert own.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips)
    written = {own.token_bytes(token): written for token, written in enumerate(own.written_bytes())}
    assert (written[b"<tool>"], written[b"<end>"]) == (b"<tool>", None)


def test_a_models_pieces_and_added_tokens_may_have_a_gap_between_them(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(tokenizer_dirs["llama-slow"] / "tokenizer.model", tmp_path)
    write_json(tmp_path, "tokenizer_config.json", added_tokens_decoder={"405": TOOL})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.encode("<tool>"), tokenizer.decode([404, 405])) == (406, [405], "<tool>")
    assert tokenizer.written_bytes()[399:] == [tokenizer.token_bytes(399), *[None] * 5, b"<tool>"]
    write_json(tmp_path, "tokenizer_config.json", added_tokens_decoder={str(2**31): TOOL})
    with pytest.raises(CheckpointError, match="id 2147483648"):
        load_tokenizer(tmp_path)


def test_ids_of_a_json_vocabulary_may_have_gaps(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    content = json.loads((tokenizer_dirs["qwen"] / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 7
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == vocabulary[last] + 1
    written = tokenizer.written_bytes()
    assert written[-8:] == [*[None] * 7, tokenizer.decode([vocabulary[last]]).encode()]
    vocabulary[last] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="has the token id 2147483648"):
        load_tokenizer(tmp_path)
