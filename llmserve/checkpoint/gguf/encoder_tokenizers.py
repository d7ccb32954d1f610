"""Makes an encoder's `tokenizer.json` from a vocabulary of kind `bert` (word pieces) or `t5` (pieces with
probabilities).

llama.cpp's converter writes `▁` before pieces that begin a word, instead of `##` before other pieces.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.gguf.pieces import SPACE
from llmserve.checkpoint.gguf.vocabulary import TokenType, Vocabulary

Json: TypeAlias = dict[str, Any]

WORD_PIECES, UNIGRAM = "bert", "t5"
LOWERCASE, STRIP_ACCENTS = "tokenizer.ggml.normalizer.lowercase", "tokenizer.ggml.normalizer.strip_accents"
CHARSMAP, TRIMS = "tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"
ADDS_SPACE = "tokenizer.ggml.add_space_prefix"
CONTINUES, LONGEST_WORD = "##", 100
# tokens around texts: keys, misspelled as in llama.cpp; and the token's usual text
FIRST = (("tokenizer.ggml.cls_token_id", "tokenizer.ggml.bos_token_id"), ("[CLS]", "<s>"))
LAST = (("tokenizer.ggml.seperator_token_id", "tokenizer.ggml.eos_token_id"), ("[SEP]", "</s>"))
UNKNOWN = (("tokenizer.ggml.unknown_token_id",), ("[UNK]", "<unk>"))


def encoder_tokenizer_json(reader: MetadataReader, vocabulary: Vocabulary, kind: str) -> Json:
    """The file for the `tokenizers` library. Problems go to `reader`."""
    tokens = [_spelling(text, of) if kind == WORD_PIECES else text for text, of in _typed(vocabulary)]
    if len(set(tokens)) < len(tokens):
        reader.problems.append(f"its vocabulary has pieces that differ only in {SPACE}")
    first, last, unknown = (_special(reader, vocabulary, *names) for names in (FIRST, LAST, UNKNOWN))
    model = (
        _word_pieces(tokens, unknown) if kind == WORD_PIECES else _pieces(vocabulary.scores.tolist(), tokens, unknown)
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
             "special": True}
            for token, text in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN).items()
        ],
        "normalizer": _bert_normalizer(reader, vocabulary) if kind == WORD_PIECES else _charsmap(reader),
        "pre_tokenizer": {"type": "BertPreTokenizer"} if kind == WORD_PIECES else _spaces(reader),
        "post_processor": _around(tokens, first, last, is_bert=kind == WORD_PIECES),
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True} if kind == WORD_PIECES else _metaspace(),
        "model": model,
    }  # fmt: skip


def _typed(vocabulary: Vocabulary) -> zip[tuple[str, int]]:
    return zip(vocabulary.tokens, vocabulary.types, strict=True)


def _spelling(text: str, kind: int) -> str:
    if text.startswith(SPACE):
        return text.removeprefix(SPACE)
    return text if kind in (TokenType.CONTROL, TokenType.UNKNOWN) else CONTINUES + text


def _special(reader: MetadataReader, vocabulary: Vocabulary, keys: tuple[str, ...], texts: tuple[str, ...]) -> int:
    for key in keys:
        if reader.has(key) and (token := reader.integer(key, minimum=0)) < len(vocabulary.tokens):
            return token
    named = [token for token, text in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN).items() if text in texts]
    if not named:
        reader.problems.append(f"its vocabulary does not name {texts[0]} (metadata {keys[0]} is missing)")
    return named[0] if named else 0


def _word_pieces(tokens: list[str], unknown: int) -> Json:
    return {
        "type": "WordPiece",
        "unk_token": tokens[unknown],
        "continuing_subword_prefix": CONTINUES,
        "max_input_chars_per_word": LONGEST_WORD,
        "vocab": {text: token for token, text in enumerate(tokens)},
    }


def _pieces(scores: list[float], tokens: list[str], unknown: int) -> Json:
    pieces = [[text, score] for text, score in zip(tokens, scores, strict=True)]
    return {"type": "Unigram", "unk_id": unknown, "vocab": pieces, "byte_fallback": False}


def _bert_normalizer(reader: MetadataReader, vocabulary: Vocabulary) -> Json:
    """If the file does not say it, a vocabulary without capital letters implies lowercasing."""
    words = (text for text, kind in _typed(vocabulary) if kind == TokenType.NORMAL and text[:2] != f"{SPACE}[")
    lowercase = reader.flag(LOWERCASE, not any(text != text.lower() for text in words))
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": reader.flag(STRIP_ACCENTS, lowercase),
        "lowercase": lowercase,
    }


def _charsmap(reader: MetadataReader) -> Json | None:
    """sentencepiece's table of character replacements."""
    stored = reader.metadata.get(CHARSMAP)
    if stored is None:
        return None
    if not isinstance(stored, np.ndarray) or stored.dtype not in (np.uint8, np.int8):
        reader.problems.append(f"metadata {CHARSMAP} must be an array of bytes")
        return None
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(stored.tobytes()).decode()}


def _metaspace(*, prepends: bool = True) -> Json:
    return {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prepends else "never",
        "split": True,
    }


def _spaces(reader: MetadataReader) -> Json:
    """Split at spaces; consecutive spaces count as one."""
    space = _metaspace(prepends=reader.flag(ADDS_SPACE, True))
    words = [{"type": "WhitespaceSplit"}] if reader.flag(TRIMS, False) else []
    return {"type": "Sequence", "pretokenizers": [*words, space]}


def _around(tokens: list[str], first: int, last: int, *, is_bert: bool) -> Json:
    """In BERT, the second text of a pair has another type; in others, one more token precedes it."""

    def special(token: int, type_id: int = 0) -> Json:
        return {"SpecialToken": {"id": tokens[token], "type_id": type_id}}

    def text(name: str, type_id: int = 0) -> Json:
        return {"Sequence": {"id": name, "type_id": type_id}}

    single = [special(first), text("A"), special(last)]
    between = [] if is_bert else [special(last)]
    second = int(is_bert)
    specials: Mapping[str, Json] = {
        tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]} for token in (first, last)
    }
    pair = [*single, *between, text("B", second), special(last, second)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": specials}
