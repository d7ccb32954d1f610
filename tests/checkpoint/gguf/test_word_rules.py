"""Words of `tokenizer.ggml.pre`, against the published patterns by another regex engine, and llama.cpp's own words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import regex
import tokenizers

from llmserve.checkpoint.reader import Checkpoint
from tests.checkpoint.gguf.test_tokenizers import TEXTS, byte_level

SAMPLES = [
    *TEXTS, "x  1234567 y", "1\n  22\n 333\n4444", "v12.345,6789", "٣٤٥٦٧ ²³½ ①", "안녕 하세요 세계", "हिन्दी में",
    "ภาษาไทย12", "it's a New iPhone's case", "getUserName iOS18",
    "我们iPhone们 ABC中", "々〇豈㐀", "a \r\n\r\nb\t\tc   ", "// http://x.y/z?q=1",
    "ßςǅ ﬁ Ａｂ", "мир ПРИВЕТ", "       8 spaces\n     5", "'S 'll he'LL", "e\u0301te\u0301 a\u0301b", "“x”——，。！？",
]  # fmt: skip

# Each pattern splits what the previous ones have left. Kimi K2's is `pat_str` of tokenization_kimi.py; the others are
# those of llama.cpp's llama-vocab.cpp, with the original where a comment there gives it.
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}"],
    "hunyuan-dense": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_V3],
    "joyai-llm": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_V3],
    "hunyuan": [QWEN],
    "midm-2.0": [QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")],
    "jais-2": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
    "exaone-moe": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "minimax-m2": [GPT4O],
    "kanana2": [GPT4O],
}


def ours(pre: str, folder: Path) -> tokenizers.Tokenizer:
    with Checkpoint.open(byte_level(folder / "m.gguf", pre)) as checkpoint:
        return tokenizers.Tokenizer.from_str((checkpoint.text_file("tokenizer.json") or b"").decode())


def words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def split(pattern: str, pieces: Iterable[str]) -> list[str]:
    """What the pattern finds, and what lies between."""
    found = regex.compile(f"({pattern})", regex.V1)
    return [part for piece in pieces for part in found.split(piece) if part]


@pytest.mark.parametrize("pre", PATTERNS)
def test_words_are_those_of_the_published_pattern(pre: str, tmp_path: Path) -> None:
    tokenizer = ours(pre, tmp_path)
    for text in SAMPLES:
        pieces = [text] if text else []
        for pattern in PATTERNS[pre]:
            pieces = split(pattern, pieces)
        assert words(tokenizer, text) == pieces, text


# What `unicode_regex_split` of llama.cpp returns for its patterns, computed once by that function.
LLAMA_CPP = {
    "deepseek-llm": [
        ["x", "  ", "1234567", " y", ",", " ", "89", "\n", "  ", "12"],
        ["It", "'", "s", " ", "3", ".", "14", " ", "½", " of", " ", " the", "\n", "\n", " ", " é", "t", "é", "s", "  "],
        ["我想在", "apple", "工作", "1314151", "天", "～", " ", "日本語テスト", "。"],
        ["Привет", " мир", "!", " ΑΒγ", "  ", "№", "5"],
        ["안녕", " ", "하세요", " ", "ไทย", " ", "12", "ก"],
        ["def", " f", "(", "x", "):", "\n", "\treturn", " x", " !=", " ", "10", "_", "000", " ", " #", " ok", "\r",
         "\n"],
        ["🚀😶", "\u200d", "🌫️", " $", "5", " <", "b", ">", "x", "</", "b", ">", " http", "://", "a", ".",
         "b", "/", "c"],
        ["e", "́ ", "हिन्दी", " ﬁ", " Ａｂ", " ", "１２３４"],
    ],
    "deepseek-coder": [
        ["x", "  ", "1", "2", "3", "4", "5", "6", "7", " y", ",", " ", "8", "9", "\n", "  ", "1", "2"],
        ["It", "'", "s", " ", "3", ".", "1", "4", " ", "½", " of", " ", " the", "\n", "\n", " ", " étés", "  "],
        ["我想在", "apple", "工作", "1", "3", "1", "4", "1", "5", "1", "天", "～", " ", "日本語テスト", "。"],
        ["Привет", " мир", "!", " ΑΒγ", "  ", "№", "5"],
        ["안녕", " ", "하세요", " ", "ไทย", " ", "1", "2", "ก"],
        ["def", " f", "(", "x", "):", "\n", "\treturn", " x", " !", "= ", "1", "0", "_", "0", "0", "0", " ", " #",
         " ok", "\r", "\n"],
        ["🚀😶", "\u200d", "🌫️ $", "5", " <", "b", ">", "x", "<", "/", "b", ">", " http", "://", "a", ".",
         "b", "/", "c"],
        ["e", "́", " ", "ह", "ि", "न", "्", "द", "ी", " ﬁ", " Ａｂ", " ", "１", "２", "３", "４"],
    ],
    "afmoe": [
        ["x", " ", " ", "1", "234", "567", " y", ",", " ", "89", "\n", " ", " ", "12"],
        ["It", "'s", " ", "3", ".", "14", " ", "½", " of", " ", " the", "\n\n", " ", " étés", "  "],
        ["我想在", "apple", "工作", "1", "314", "151", "天", "～", " ", "日本語テスト", "。"],
        ["Привет", " мир", "!", " ΑΒγ", " ", " №", "5"],
        ["안녕", " ", "하세요", " ", "ไ", "ทย", " ", "12", "ก"],
        ["def", " f", "(x", "):\n", "\treturn", " x", " !=", " ", "10", "_", "000", " ", " #", " ok", "\r\n"],
        ["🚀😶", "\u200d", "🌫", "️", " $", "5", " <", "b", ">x", "</", "b", ">", " http", "://", "a", ".b", "/c"],
        ["é", " हिन्दी", " ﬁ", " Ａｂ", " ", "１", "２３４"],
    ],
    "exaone-moe": [
        ["x", " ", " ", "1", "2", "3", "4", "5", "6", "7", " y", ",", " ", "8", "9", "\n", " ", " ", "1", "2"],
        ["It", "'s", " ", "3", ".", "1", "4", " ", "½", " of", " ", " the", "\n\n", " ", " étés", "  "],
        ["我想在apple工作", "1", "3", "1", "4", "1", "5", "1", "天", "～", " 日本語テスト", "。"],
        ["Привет мир", "!", " ΑΒγ", " ", " №", "5"],
        ["안녕 하세요 ไทย", " ", "1", "2", "ก"],
        ["def f", "(x", "):\n", "\treturn x", " !=", " ", "1", "0", "_", "0", "0", "0", " ", " #", " ok", "\r\n"],
        ["🚀😶\u200d🌫️", " $", "5", " <", "b", ">x", "</", "b", ">", " http", "://", "a", ".b", "/c"],
        ["é हिन्दी ﬁ Ａｂ", " ", "１", "２", "３", "４"],
    ],
    "jais-2": [
        ["x", " ", " ", "123", "456", "7", " y", ",", " ", "89", "\n", " ", " ", "12"],
        ["It", "'s", " ", "3", ".", "14", " ", "½", " of", " ", " the", "\n\n", " ", " étés", "  "],
        ["我想在apple工作", "131", "415", "1", "天", "～", " 日本語テスト", "。"],
        ["Привет", " мир", "!", " ΑΒγ", " ", " №", "5"],
        ["안녕", " 하세요", " ไทย", " ", "12", "ก"],
        ["def", " f", "(x", "):\n", "\treturn", " x", " !=", " ", "10", "_", "000", " ", " #", " ok", "\r\n"],
        ["🚀😶\u200d🌫️", " $", "5", " <", "b", ">x", "</", "b", ">", " http", "://", "a", ".b", "/c"],
        ["e", "́", " ह", "िन", "्द", "ी", " ﬁ", " Ａｂ", " ", "１２３", "４"],
    ],
}  # fmt: skip


@pytest.mark.parametrize("pre", LLAMA_CPP)
def test_words_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    tokenizer = ours(pre, tmp_path)
    for expected in LLAMA_CPP[pre]:
        assert words(tokenizer, "".join(expected)) == expected


def test_digits_of_afmoe_are_grouped_from_the_right_in_linear_time(tmp_path: Path) -> None:
    """Without its branches for later groups and for text without numbers, the rule takes quadratic time."""
    tokenizer = ours("afmoe", tmp_path)
    assert words(tokenizer, "1" * 100_000) == ["1", *["111"] * 33_333]
    assert words(tokenizer, "a" * 1_000_000) == ["a" * 1_000_000]


@pytest.mark.parametrize(("pre", "whole"), [("kimi-k2", True), ("hunyuan", True), ("deepseek-llm", False)])
def test_tiktokens_models_use_a_word_that_is_a_token(pre: str, whole: bool, tmp_path: Path) -> None:
    assert json.loads(ours(pre, tmp_path).to_str())["model"]["ignore_merges"] is whole
