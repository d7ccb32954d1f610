"""GGUF files of BERT and XLM-R: how they pool, and the ids of the original tokenizers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.sentence_transformers import read_pooling
from llmserve.errors import CheckpointError
from llmserve.models.spec import Pooling
from tests.checkpoint.gguf.test_tokenizers import ours
from tests.embedders import make_reranker, write_word_pieces
from tests.gguf_encoders import convert_encoder, word_pieces_metadata
from tests.gguf_files import make_gguf
from tests.tiny_tokenizers import SENTENCES

TEXTS = [
    "", "The quick brown fox", " the  Lake,of\tbirds!", "harbours Ünïcode\u00e9 naïve", "中文 lake 日本",
    "[CLS] fox [SEP]", "x" * 101, "don't, (stop)\n\nwinter...", "🚀 fox\u200b",
]  # fmt: skip


def test_a_decoder_with_a_pooling_makes_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding is converted."""
    for kind, wanted in ((3, Pooling("last", normalize=True)), (0, None)):
        path = make_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.pooling_type": kind})
        with Checkpoint.open(path) as checkpoint:
            assert read_pooling(checkpoint, None) == wanted
    for kind in (4, 9):
        path = make_gguf(tmp_path / "m.gguf", "qwen3", metadata={"qwen3.pooling_type": kind})
        with pytest.raises(
            CheckpointError, match=rf"qwen3\.pooling_type {kind} is not supported; supported: 1 \(mean\)"
        ):
            Checkpoint.open(path)


def test_what_a_file_lacks_is_named(tmp_path: Path) -> None:
    make_reranker(tmp_path / "folder", "bert")
    path = convert_encoder(tmp_path / "m.gguf", tmp_path / "folder", "rank", {"bert.attention.causal": True})
    with pytest.raises(CheckpointError, match=r"(?s)causal must be false.*no tensor cls\.weight: converters leave out"):
        Checkpoint.open(path)


@pytest.mark.parametrize("lowercase", [True, False, None])
def test_ids_of_word_pieces_are_those_of_the_original(lowercase: bool | None, tmp_path: Path) -> None:
    """None: the file does not say it."""
    from tokenizers import normalizers

    write_word_pieces(tmp_path)
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    original.normalizer = normalizers.BertNormalizer(lowercase=lowercase is not False)
    metadata = word_pieces_metadata(tmp_path)
    if lowercase is not None:
        metadata["tokenizer.ggml.normalizer.lowercase"] = lowercase
    found: Any = ours(make_gguf(tmp_path / "m.gguf", metadata=metadata), tmp_path / "ours")
    for text in TEXTS:
        assert found.encode(text, add_special_tokens=True) == original.encode(text).ids, text
        pair = original.encode(text, "brown lake")
        assert found.encode_pair(text, "brown lake") == (pair.ids, pair.type_ids.index(1))


def test_pieces_without_a_difference_are_refused(tmp_path: Path) -> None:
    write_word_pieces(tmp_path)
    metadata = word_pieces_metadata(tmp_path)
    metadata["tokenizer.ggml.tokens"][4] = "▁[SEP]"
    with pytest.raises(CheckpointError, match="pieces that differ only in ▁"):
        Checkpoint.open(make_gguf(tmp_path / "m.gguf", metadata=metadata))


def unigram_model() -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_writer=model, model_type="unigram", vocab_size=120,
        character_coverage=1.0, unk_id=3, bos_id=0, pad_id=1, eos_id=2, minloglevel=2, num_threads=1,
    )  # fmt: skip
    return model.getvalue()


def test_ids_of_a_unigram_model_are_those_of_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    model = unigram_model()
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(original.vocab_size())
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [original.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [float(original.get_score(i)) for i in ids],
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [1] * (len(ids) - 4),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": charsmap(model),
    }
    found: Any = ours(make_gguf(tmp_path / "m.gguf", metadata=metadata), tmp_path / "ours")
    for text in [*SENTENCES, "The  river ", "ﬁnds e\u0301 １２", "A\tquiet\nhill", "日 fox"]:
        assert found.encode(text) == original.encode(text), text
        assert found.encode(text, add_special_tokens=True) == [0, *original.encode(text), 2]
    assert found.encode_pair("fox", "hill")[0] == [0, *original.encode("fox"), 2, 2, *original.encode("hill"), 2]


def charsmap(model: bytes) -> bytes:
    """`precompiled_charsmap` of the normalizer: field 2 of field 3."""

    def fields(message: bytes) -> dict[int, bytes]:
        found, place = {}, 0

        def varint() -> int:
            nonlocal place
            value = shift = 0
            while True:
                byte = message[place]
                place, value, shift = place + 1, value | (byte & 0x7F) << shift, shift + 7
                if byte < 0x80:
                    return value

        while place < len(message):
            key = varint()
            if key & 7 == 0:
                varint()
            else:
                size = varint() if key & 7 == 2 else 4
                found[key >> 3] = message[place : place + size]
                place += size
        return found

    return fields(fields(model)[3])[2]
