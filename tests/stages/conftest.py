"""One small trained tokenizer of each kind that checkpoints come with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizers import SENTENCES, sentencepiece_model, write_byte_level_tokenizer

MULTILINGUAL = [
    *SENTENCES,
    "Ein schöner Tag über der Brücke, naïve café.",
    "百川智能 大模型 北京 天气 很好",
    "2024 年 12 月",
]


def write_baichuan(path: Path) -> None:
    """sentencepiece BPE with byte fallback, no leading space, no bos; 195 and 196 are role tokens."""
    (path / "tokenizer.model").write_bytes(sentencepiece_model(620, 197))
    write_json(path, "tokenizer_config.json", tokenizer_class="BaichuanTokenizer", add_bos_token=False)
    write_json(
        path,
        "config.json",
        model_type="baichuan",
        position_embedding="rope",
        model_max_length=64,
        eos_token_id=2,
        pad_token_id=0,
    )


def write_llama_slow(path: Path) -> None:
    """sentencepiece BPE with byte fallback and a leading space."""
    (path / "tokenizer.model").write_bytes(sentencepiece_model(400, 3))
    write_json(path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", eos_token="</s>", bos_token="<s>")


def write_unigram(path: Path) -> None:
    """sentencepiece's own defaults: unigram, NFKC, surplus spaces removed, unknown characters lost."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(MULTILINGUAL * 4), model_writer=model, model_type="unigram", vocab_size=120,
        hard_vocab_limit=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    (path / "tokenizer.model").write_bytes(model.getvalue())


def write_qwen(path: Path) -> None:
    write_byte_level_tokenizer(path, 400)


BYTE_FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def write_llama_fast(path: Path) -> None:
    """tokenizer.json as transformers converts Llama 2: byte fallback, and a decoder that strips one leading space."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [*BYTE_FALLBACK, decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    train_with_bytes(tokenizer, path, ["<unk>", "<s>", "</s>"])


def write_gemma(path: Path) -> None:
    """tokenizer.json as Gemma has it: byte fallback, no space put before the text or stripped, bos at the front."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(BYTE_FALLBACK)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    train_with_bytes(tokenizer, path, ["<pad>", "<eos>", "<bos>", "<unk>"])
    write_json(path, "tokenizer_config.json", tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>")


def train_with_bytes(tokenizer: tokenizers.Tokenizer, path: Path, special: list[str]) -> None:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    train(tokenizer, trainers.BpeTrainer(vocab_size=500, special_tokens=special + byte_tokens, show_progress=False))
    content = json.loads(tokenizer.to_str())  # byte tokens belong to the vocabulary, and are not added to it
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    (path / "tokenizer.json").write_text(json.dumps(content))


def write_metaspace(path: Path) -> None:
    """tokenizer.json with a unigram model and Metaspace on both sides."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    train(tokenizer, trainer)
    tokenizer.save(str(path / "tokenizer.json"))


def train(tokenizer: tokenizers.Tokenizer, trainer: trainers.Trainer) -> None:
    tokenizer.train_from_iterator(MULTILINGUAL * 4, trainer)


def write_json(path: Path, name: str, **content: object) -> None:
    (path / name).write_text(json.dumps(content))


WRITERS: dict[str, Callable[[Path], None]] = {
    "baichuan": write_baichuan,
    "llama-slow": write_llama_slow,
    "unigram": write_unigram,
    "qwen": write_qwen,
    "llama-fast": write_llama_fast,
    "gemma": write_gemma,
    "metaspace": write_metaspace,
}


@pytest.fixture(scope="session")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in WRITERS}
    for kind, path in paths.items():
        WRITERS[kind](path)
    return paths


@pytest.fixture(scope="session")
def tokenizers_by_kind(tokenizer_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(path) for kind, path in tokenizer_dirs.items()}


@pytest.fixture(scope="session", params=[*WRITERS])
def tokenizer(request: pytest.FixtureRequest, tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind[request.param]
