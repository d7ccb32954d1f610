"""Makes `tokenizer.json` from a vocabulary of kind `gpt2` (byte-level BPE) or `gemma4`, with the file's merges.

The file does not describe how text is split into words before the merges, but only names the rule
(`tokenizer.ggml.pre`). llama.cpp's converter finds this name by comparing the ids of a test text. The patterns are
those of the models' own tokenizers, or llama.cpp's where these are not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.gguf.pieces import SPACE
from llmserve.checkpoint.gguf.vocabulary import TokenType, Vocabulary

Json: TypeAlias = dict[str, Any]

PRE_KEY, MERGES_KEY = "tokenizer.ggml.pre", "tokenizer.ggml.merges"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
POWERS_OF_TWO = "|".join(rf"\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1))
CHINESE_AND_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
EUROPEAN = (  # letters with two cases, as DeepSeek's first models list them
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
EAST_ASIAN = (  # as in llama.cpp; its range from U+8C48 contains Hangul and others
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    "\u1000-\u109f\u1100-\u11ff"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(digits: str, after_signs: str = r"[\r\n]*") -> str:
    """Llama 3's pattern; many later models use it with other runs of digits. `after_signs`: line ends that follow
    signs."""
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{SPACES}"


def _words_by_case(digits: str, ending: str, after_signs: str = r"[\r\n/]*", but: str = "") -> str:
    """GPT-4o's pattern: a capital letter starts a word. `but`: which letters are in no word."""
    begin, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{UPPER}{but}]", f"[{LOWER}{but}]"
    return (
        rf"{begin}{upper}*{lower}+{ending}|{begin}{upper}+{lower}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after_signs}|{SPACES}"
    )


@dataclass(frozen=True, slots=True)
class WordRule:
    """How text is split into words."""

    patterns: tuple[str, ...] = ()  # each splits what the previous ones have left
    digits_apart: bool = False
    then_gpt2: bool = False  # whether GPT-2's own pattern comes last
    takes_whole_words: bool = False  # whether a word that is a token is used without merges
    adds_bos: bool = False
    normalizer: Json | None = field(default=None)


LLAMA3 = WordRule((_words(r"\p{N}{1,3}"),), takes_whole_words=True, adds_bos=True)
WORDS_OF_3_DIGITS = WordRule((_words(r"\p{N}{1,3}"),))
QWEN2 = WordRule((_words(r"\p{N}"),), normalizer={"type": "NFC"})
QWEN35 = WordRule(  # marks belong to the preceding letters
    (_words(r"\p{N}").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),),
    normalizer={"type": "NFC"},
)
STABLELM2 = WordRule((_words(r"\p{N}"),))
SEED_CODER = WordRule((_words(r"\p{N}", after_signs=""),))
TEKKEN = WordRule((_words_by_case(r"\p{N}", ""),), takes_whole_words=True, adds_bos=True)
GPT4O = WordRule((_words_by_case(r"\p{N}{1,3}", f"{CONTRACTIONS}?"),))
DEEPSEEK3 = WordRule(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        rf"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
    )
)
DEEPSEEK_CODER = WordRule(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_AND_KOREAN, r"\p{N}"))
DEEPSEEK_LLM = WordRule(
    (
        "[\r\n]",
        rf"\s?[{EUROPEAN}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        CHINESE_AND_KOREAN,
        r"\p{N}+",
    )
)
KIMI_K2 = WordRule(
    (r"\p{Han}+|" + _words_by_case(r"\p{N}{1,3}", f"{CONTRACTIONS}?", r"[\r\n]*", but=r"&&[^\p{Han}]"),),
    takes_whole_words=True,
)
HUNYUAN = WordRule((_words(r"\p{N}"),), takes_whole_words=True)
EXAONE_MOE = WordRule(  # a word may be several, with single spaces between them
    (
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
# Digits are in groups of three from the right. The first group keeps what precedes it, as in llama.cpp: so a space
# before a number is apart. A group that is not a number's first is found without a look ahead, in linear time.
AFMOE = WordRule(
    (
        r"\P{N}*(?<!\p{N})\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}|\P{N}+\z",
        f"[{EAST_ASIAN}]+",
        DEEPSEEK3.patterns[-1],
    )
)
JAIS2 = WordRule(  # runs of spaces are powers of two
    (_words(r"\p{N}{1,3}").replace(SPACES, rf"\s*[\r\n]+|{POWERS_OF_TWO}|\s{{1,2}}(?!\S)|\s"),)
)
DIGITS_APART = WordRule(digits_apart=True, then_gpt2=True)
PLAIN = WordRule(then_gpt2=True)
DEFAULT = WordRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
RULES: Mapping[str, WordRule] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WORDS_OF_3_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": QWEN35,
    "stablelm2": STABLELM2,
    "seed-coder": SEED_CODER,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b"), DIGITS_APART),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4"), PLAIN),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "kimi-k2": KIMI_K2,
    "hunyuan": HUNYUAN,
    "exaone-moe": EXAONE_MOE,
    "afmoe": AFMOE,
    "jais-2": JAIS2,
    "default": DEFAULT,
}


def word_rule(reader: MetadataReader) -> WordRule:
    """The rule named by `tokenizer.ggml.pre`. An unknown name is a problem, because other words give other ids."""
    name = reader.text(PRE_KEY, "")
    if name in RULES:
        return RULES[name]
    given = f"{name!r} is not supported" if name else "is missing, as in files from before May 2024"
    reader.problems.append(
        f"metadata {PRE_KEY}, the rule that splits text into words, {given}; supported: {', '.join(RULES)}. Or put "
        "the model's own tokenizer.json and tokenizer_config.json next to the file, and build from the folder"
    )
    return DEFAULT


def tokenizer_json(reader: MetadataReader, vocabulary: Vocabulary, rule: WordRule) -> Json:
    """The file for the `tokenizers` library. Problems go to `reader`."""
    return {
        **_common(vocabulary),
        "normalizer": rule.normalizer,
        "pre_tokenizer": _pre_tokenizer(rule),
        "decoder": _byte_level(use_regex=True),
        "model": _model(reader, vocabulary) | {"ignore_merges": rule.takes_whole_words},
    }


def gemma4_tokenizer_json(reader: MetadataReader, vocabulary: Vocabulary) -> Json:
    """For Gemma 4: merges of characters, with `▁` for spaces. Characters without a token become bytes. Lines are
    words."""
    unknown = vocabulary.special.get("unk_token")
    model = {"byte_fallback": True, "fuse_unk": True, "unk_token": vocabulary.tokens[unknown] if unknown else None}
    return {
        **_common(vocabulary),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": _split(r"[^\n]+|\n+"),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": _model(reader, vocabulary) | model,
    }


def _common(vocabulary: Vocabulary) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, text, is_special=vocabulary.types[i] != TokenType.USER_DEFINED)
            for i, text in vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED).items()
        ],
        "post_processor": _post_processor(vocabulary),
    }


def _model(reader: MetadataReader, vocabulary: Vocabulary) -> Json:
    unused = vocabulary.of_type(TokenType.UNUSED)
    ids = {text: i for i, text in enumerate(vocabulary.tokens) if i not in unused}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": ids,
        "merges": _merges(reader, ids),
    }


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _added_token(token: int, text: str, *, is_special: bool) -> Json:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **plain, "special": is_special}


def _byte_level(*, use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(rule: WordRule) -> Json:
    steps = [_split(pattern) for pattern in rule.patterns]
    if rule.digits_apart:
        steps.append({"type": "Digits", "individual_digits": True})
    return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(use_regex=rule.then_gpt2)]}


def _post_processor(vocabulary: Vocabulary) -> Json | None:
    """Which special tokens surround a text."""
    head = [vocabulary.special["bos_token"]] if vocabulary.adds_bos else []
    tail = [vocabulary.special["eos_token"]] if vocabulary.adds_eos else []
    if not head and not tail:
        return None

    def piece(token: int) -> Json:
        return {"SpecialToken": {"id": vocabulary.tokens[token], "type_id": 0}}

    def around(*sequences: str) -> list[Json]:
        texts = [{"Sequence": {"id": name, "type_id": 0}} for name in sequences]
        return [*map(piece, head), *texts, *map(piece, tail)]

    names = {vocabulary.tokens[token]: token for token in (*head, *tail)}
    special = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in names.items()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


def _merges(reader: MetadataReader, ids: Mapping[str, int]) -> list[Sequence[str]]:
    merges: list[Sequence[str]] = []
    for text in reader.texts(MERGES_KEY):
        left, _, right = text[1:].partition(" ")  # a token may begin with a space
        left = text[:1] + left
        if not (left in ids and right in ids and left + right in ids):
            reader.problems.append(
                f"merge {text!r} (number {len(merges)} of {MERGES_KEY}) has tokens that the vocabulary lacks"
            )
            break
        merges.append((left, right))
    return merges
