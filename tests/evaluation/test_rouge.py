from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from llmserve.evaluation.judging.rouge import METRICS, Tokenizer, rouge_scores

DOCSTRINGS = Path(__file__).resolve().parents[2] / "eval" / "data" / "docstrings.jsonl"
TOKENIZER = Tokenizer(DefaultTokenizer(use_stemmer=False))


@pytest.mark.parametrize("stemming", [True, False])
@given(text=st.text(st.characters(codec="ascii")))
def test_ascii_text_has_the_words_of_the_package(stemming: bool, text: str) -> None:
    default = DefaultTokenizer(stemming)
    assert Tokenizer(default).tokenize(text) == default.tokenize(text)


@pytest.mark.parametrize("stemming", [True, False])
def test_english_scores_are_those_of_the_package(stemming: bool) -> None:
    rows = [json.loads(line) for line in DOCSTRINGS.read_text().splitlines()[:50]]
    texts, references = [row["document"] for row in rows], [row["summary"] for row in rows]
    scorer = RougeScorer(list(METRICS), use_stemmer=stemming)
    expected = [scorer.score(reference, text) for text, reference in zip(texts, references, strict=True)]
    scores = rouge_scores(texts, references, stemming=stemming)
    for name in METRICS:
        assert scores[name].tolist() == [100 * score[name].fmeasure for score in expected]
    assert scores["rougeL"].mean() > 10


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("\u4eca\u5929\u5929\u6c14\uff0cvery good\u3002", ["\u4eca", "\u5929", "\u5929", "\u6c14", "very", "good"]),
        ("Baichuan2\u6a21\u578b", ["baichuan2", "\u6a21", "\u578b"]),
        ("\u30ab\u30bf\u30ab\u30ca", ["\u30ab", "\u30bf", "\u30ab", "\u30ca"]),
        (
            "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
            ["\u043f\u0440\u0438\u0432\u0435\u0442", "\u043c\u0438\u0440"],
        ),
        ("na\u00efve re\u0301sume\u0301", ["na\u00efve", "r\u00e9sum\u00e9"]),
        ("\u0939\u093f\u0928\u094d\u0926\u0940 \u0906", ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u0906"]),
        ("\ud55c\uad6d\uc5b4 \ub9d0", ["\ud55c\uad6d\uc5b4", "\ub9d0"]),
        ("\u2713 \u2014 \U0001f600", []),
    ],
    ids=["chinese", "mixed", "kana", "cyrillic", "accents", "devanagari", "hangul", "symbols"],
)
def test_words_of_other_scripts(text: str, tokens: list[str]) -> None:
    assert TOKENIZER.tokenize(text) == tokens


def test_chinese_is_scored_by_character() -> None:
    scores = rouge_scores(
        ["\u4eca\u5929\u5f88\u51b7\u3002", "\u5b8c\u5168\u4e0d\u540c"],
        ["\u4eca\u5929\u5f88\u70ed\u3002", "\u4eca\u5929\u5f88\u70ed"],
        stemming=True,
    )
    assert scores["rouge1"].tolist() == pytest.approx([75, 0])
    assert scores["rouge2"].tolist() == pytest.approx([100 * 2 / 3, 0])
    assert scores["rougeL"].tolist() == pytest.approx([75, 0])


def test_a_word_is_stemmed_once() -> None:
    stemmed = []

    class Stemmer:
        def tokenize(self, text: str) -> list[str]:
            stemmed.append(text)
            return [text]

    assert Tokenizer(Stemmer()).tokenize("The file, the files") == ["the", "file", "the", "files"]
    assert stemmed == ["the", "file", "files"]
