"""Tokenizers from metadata: the ids of those that it was taken from, and those of transformers' conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import pre_tokenizers

from llmserve.checkpoint.gguf.byte_level import RULES
from llmserve.checkpoint.reader import Checkpoint
from llmserve.errors import CheckpointError
from llmserve.stages.chat import Message
from llmserve.stages.files import TextFiles
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.gguf_files import byte_level_metadata, make_gguf, pieces_metadata
from tests.tiny_tokenizers import SENTENCES, sentencepiece_model

TEXTS = [
    "", " ", "  ", "\t", "\n", "\n\n \n", "Hello world", " Hello  World!", "Hello,\nworld\r\n\r\n  and   more",
    "3 33 333 3333 33333", "1,234.56 x86_64 v2.0.1", "I'm sure you'll've been there; SHE'S not, o'clock'S",
    "The river finds its way", "camelCaseWord HTMLParser XMLHttpRequest", "нещо на Български", "កាន់តែពិសេស",
    "Cửa Việt e\u0301 \u212b ﬁ", "我想在apple工作1314151天～", "日本語のテキスト。", "🚀 (normal) 🦙.cpp",
    "😶\u200d🌫️", "a\u00a0b\u2003c\u200bd", "!!!!!! --- === ... ???", "def f(x):\n    return x  # done\n",
    "<s> </s> <unk> <0x41> ▁x", "\x00\x7f\ufffd\U0010ffff", "<|im_start|>user\nhi<|im_end|>", "x <|endoftext|>y",
]  # fmt: skip


def ours(path: Path, folder: Path) -> Tokenizer:
    """The tokenizer of the GGUF file `path`, by way of the text files that an engine would have."""
    folder.mkdir(exist_ok=True)
    with Checkpoint.open(path) as checkpoint:
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json"):
            if (content := checkpoint.text_file(name)) is not None:
                (folder / name).write_bytes(content)
    return load_tokenizer(folder)


def converted_by_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def byte_level(path: Path, pre: str = "gpt-2", **metadata: Any) -> Path:
    entries = byte_level_metadata(path.parent / "original", 320, pre)
    return make_gguf(path, "qwen2", metadata=entries | {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})


def test_byte_level_ids_are_those_of_the_original(tmp_path: Path) -> None:
    found = ours(byte_level(tmp_path / "m.gguf"), tmp_path / "ours")
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "original" / "tokenizer.json"))
    assert found.vocab_size == original.get_vocab_size() == 320
    for text in TEXTS:
        assert found.encode(text) == original.encode(text, add_special_tokens=False).ids
        assert found.decode(found.encode(text), False) == original.decode(found.encode(text), skip_special_tokens=False)
    assert found.encode("<|im_end|>") == [2]
    assert 2 not in found.encode("<|im_end|>", banned=[2])


WORDS: dict[str, list[Any]] = {  # what the models' own tokenizer.json files have
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_the_original(pre: str, tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", pre)
    found = ours(path, tmp_path / "ours")
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "original" / "tokenizer.json"))
    original.pre_tokenizer = pre_tokenizers.Sequence(WORDS[pre])
    for text in TEXTS:
        assert found.encode(text) == original.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2", "gpt-4o", "dbrx"])
def test_byte_level_ids_are_those_of_transformers_conversion(pre: str, tmp_path: Path) -> None:
    """Without the normalizer, which transformers forgets: Qwen's tokenizers compose characters."""
    path = byte_level(tmp_path / "m.gguf", pre)
    found, other = ours(path, tmp_path / "ours"), converted_by_transformers(path)
    for text in TEXTS:
        if pre == "qwen2" and "\u0301" in text:
            assert found.encode("e\u0301") == found.encode("é")
            continue
        assert found.encode(text) == other.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize("pre", RULES)
def test_every_rule_loads_and_loses_nothing(pre: str, tmp_path: Path) -> None:
    found = ours(byte_level(tmp_path / "m.gguf", pre), tmp_path / "ours")
    for text in TEXTS:
        if pre not in ("qwen2", "deepseek-r1-qwen", "megrez", "qwen35"):  # which compose characters
            assert found.decode(found.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("default", "it's 12345, ok", ["it", "'", "s", " ", "123", "45", ",", " ok"]),  # punctuation apart
        ("deepseek-v3", "it's 12345,\u4e16\u3067\u30c7 ok!\n x", ["it", "'s", " ", "123", "45", ",",
                                                            "\u4e16\u3067\u30c7", " ok", "!\n", " x"]),
    ],
)  # fmt: skip
def test_words_of_rules_that_transformers_lacks(pre: str, text: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = byte_level(tmp_path / "a" / "m.gguf", pre)
    with Checkpoint.open(path) as checkpoint:
        content = json.loads(checkpoint.text_file("tokenizer.json") or b"")
    words = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in words] == expected


def gemma4_tokenizer() -> tokenizers.Tokenizer:
    """In the form of Gemma's tokenizer.json, of this page's texts."""
    from tokenizers import decoders, models, normalizers, trainers

    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # finds none
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special[:5], show_progress=False)
    made.train_from_iterator([*SENTENCES, "\n\n\n", "\n\n"], trainer)
    model = json.loads(made.to_str())
    vocab = model["model"]["vocab"]
    model["model"]["vocab"] = vocab | {text: len(vocab) + i for i, text in enumerate(special[5:])}
    return tokenizers.Tokenizer.from_str(json.dumps(model))


def test_ids_of_gemma_4_are_those_of_the_original(tmp_path: Path) -> None:
    original = gemma4_tokenizer()
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 5 + [6 if text.startswith("<0x") else 1 for text in tokens[5:]],
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        **{f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("padding", "eos", "bos", "unknown"))},
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    found = ours(make_gguf(tmp_path / "m.gguf", metadata=metadata, vocab_size=len(tokens)), tmp_path / "ours")
    for text in [*TEXTS, *SENTENCES, "a\n\n\n\n b", "<|turn>user\n<bos>"]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids, text
        assert found.encode(text, add_special_tokens=True) == [2, *ids]
        assert found.decode(ids, False) == original.decode(ids, skip_special_tokens=False)
    assert (found.bos_id, found.eos_id) == (2, 1)


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_piece_ids_are_those_of_the_original(add_dummy_prefix: bool, tmp_path: Path) -> None:
    model = sentencepiece_model(320, 3 if add_dummy_prefix else 4)  # the second kind has no leading space
    metadata = pieces_metadata(model) | ({} if add_dummy_prefix else {"tokenizer.ggml.add_space_prefix": False})
    found = ours(make_gguf(tmp_path / "m.gguf", metadata=metadata), tmp_path / "ours")
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert (found.vocab_size, found.bos_id, found.eos_id) == (320, 1, 2)
    for text in TEXTS:
        if "<s>" in text:
            continue  # sentencepiece reads special tokens as characters
        assert found.encode(text) == original.encode(text)
        assert found.encode(text, add_special_tokens=True) == [1, *original.encode(text)]
        assert found.decode(found.encode(text)) == original.decode(original.encode(text))
    assert found.encode_marked("<s>hi</s>")[0] == 1


def test_piece_ids_are_those_of_transformers_conversion(tmp_path: Path) -> None:
    """Which reads special tokens in any text, and puts no space before one."""
    path = make_gguf(tmp_path / "m.gguf", tokenizer="pieces")
    found, other = ours(path, tmp_path / "ours"), converted_by_transformers(path)
    for text in TEXTS:
        if text and "<" not in text and not text.startswith(" "):
            assert found.encode(text, add_special_tokens=True) == other.encode(text), text


def test_user_defined_and_unused_pieces(tmp_path: Path) -> None:
    """Gemma has tokens of several spaces, which a converter writes as spaces; Phi-3 calls padding unknown."""
    metadata = pieces_metadata(sentencepiece_model(320, 3))
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens[316:320] = ["    ", "<tool>", "<|end|>", "[PAD319]"]
    types[316:320] = [4, 4, 3, 2]
    types[0] = 3
    own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    found = ours(make_gguf(tmp_path / "m.gguf", metadata=metadata | own), tmp_path / "ours")
    ids = found.encode("a    b<tool>c<|end|>[PAD319]")
    assert 316 in ids
    assert 317 in ids
    assert 318 in ids
    assert 319 not in ids
    assert found.decode([318]) == ""


def test_phi_3s_special_tokens_take_white_space_along(tmp_path: Path) -> None:
    """As in its own tokenizer, and in llama.cpp. The file does not say it."""
    metadata = pieces_metadata(sentencepiece_model(320, 3))
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    tokens[318:320], types[318:320] = ["<|user|>", "<|endoftext|>"], [3, 3]
    own = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    for kind, strips in (("phi3", True), ("llama", False)):
        found = ours(make_gguf(tmp_path / f"{kind}.gguf", kind, metadata=metadata | own), tmp_path / kind)
        assert (found.encode_marked("<|user|>\n hi") == found.encode_marked("<|user|>hi")) is strips
        assert found.encode_marked("<|endoftext|>\nhi") != found.encode_marked("<|endoftext|>hi")
        assert found.encode_marked("a <|user|>") != found.encode_marked("a<|user|>")


def test_special_tokens_and_what_ends_an_answer(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "llama-bpe", bos_token_id=1, eot_token_id=2, eos_token_id=0)
    found = ours(path, tmp_path / "ours")
    assert (found.bos_id, found.eos_id, found.pad_id) == (1, 0, 0)
    assert found.encode("hi", add_special_tokens=True) == [1, *found.encode("hi")]
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.generation_config == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [0, 2]}
        assert checkpoint.config["eos_token_id"] == 0


@pytest.mark.parametrize(("pre", "add", "expected"), [
    ("llama-bpe", {}, [1]),
    ("llama-bpe", {"add_bos_token": False}, []),
    ("smollm", {}, []),
    ("smollm", {"add_bos_token": True}, [1]),
    ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1, 2]),
])  # fmt: skip
def test_what_stands_around_a_text(pre: str, add: dict[str, bool], expected: list[int], tmp_path: Path) -> None:
    found = ours(byte_level(tmp_path / "m.gguf", pre, bos_token_id=1, **add), tmp_path / "ours")
    assert found.encode("", add_special_tokens=True) == expected


def test_an_end_of_turn_is_found_by_its_text(tmp_path: Path) -> None:
    """Files name one end token, and chat models often end a turn with another."""
    with Checkpoint.open(byte_level(tmp_path / "m.gguf", eos_token_id=5)) as checkpoint:
        assert checkpoint.generation_config["eos_token_id"] == [5, 0, 2]  # <|endoftext|>, <|im_end|>


def test_sampling_is_that_of_the_original_model(tmp_path: Path) -> None:
    """A converter writes what generation_config.json said."""
    said = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05, "sequence": "temperature"}
    metadata = {f"general.sampling.{key}": value for key, value in said.items()} | {"general.sampling.mirostat": 1}
    metadata |= byte_level_metadata(tmp_path / "original", 320, "gpt-2")
    with Checkpoint.open(make_gguf(tmp_path / "m.gguf", metadata=metadata)) as checkpoint:
        found = {name: value for name, value in checkpoint.generation_config.items() if not name.endswith("_id")}
    assert found == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05}


def renamed(path: Path, kinds: dict[str, int], **metadata: Any) -> Path:
    """Tokens from 300 on have these texts and types."""
    entries = byte_level_metadata(path.parent / "original", 320, "gpt-4o")
    entries["tokenizer.ggml.merges"] = entries["tokenizer.ggml.merges"][:20]  # of tokens before them
    tokens, types = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    for place, (text, kind) in enumerate(kinds.items(), 300):
        tokens[place], types[place] = text, kind
    return make_gguf(path, "qwen2", metadata=entries | {f"tokenizer.ggml.{k}": v for k, v in metadata.items()})


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, [300, 301]),  # gpt-oss: thoughts end with the third
        ({"<|end|>": 3}, [300]),  # Phi-3
        ({"<turn|>": 3, "<|tool_response>": 4, "<eos>": 3}, [300, 301, 302]),  # Gemma 4
        ({"<|eot_id|>": 4, "<think>": 4}, [300]),  # a token that a user has added
    ],
)
def test_what_ends_the_answers_of_chat_models(kinds: dict[str, int], expected: list[int], tmp_path: Path) -> None:
    path = renamed(tmp_path / "m.gguf", kinds, eos_token_id=5)
    with Checkpoint.open(path) as checkpoint:
        assert sorted(checkpoint.generation_config["eos_token_id"]) == [0, 2, 5, *expected]
        config = json.loads(checkpoint.text_file("tokenizer_config.json") or b"")
    assert {str(token) for token in expected} <= config["added_tokens_decoder"].keys()


def test_the_template_for_tools_is_used_for_them(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    entries = byte_level_metadata(tmp_path / "original", 320, "gpt-2") | templates
    ours(make_gguf(tmp_path / "m.gguf", "qwen2", metadata=entries), tmp_path / "ours")
    files = TextFiles.read(tmp_path / "ours")
    assert (files.chat_template, files.tool_template) == ("plain", "with tools")


def test_the_chat_template_is_used(tmp_path: Path) -> None:
    ours(byte_level(tmp_path / "m.gguf"), tmp_path / "ours")
    prompt = TextPrompt(messages=[Message("user", "hi")])
    ids = Preprocessor.open(tmp_path / "ours").prepare(prompt).input_ids
    assert ids[0] == 1
    assert 2 in ids


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    for name, metadata in (("a", {}), ("b", {"tokenizer.ggml.model": "no_vocab"})):
        with Checkpoint.open(make_gguf(tmp_path / f"{name}.gguf", metadata=metadata)) as checkpoint:
            assert checkpoint.text_file("tokenizer.json") is None
            assert checkpoint.text_file("tokenizer_config.json") is None


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "words": ({"pre": "bloom"}, "splits text into words, 'bloom' is not supported; supported: llama3"),
    "no words": ({"pre": None}, "is missing, as in files from before May 2024"),
    "kind": ({"model": "rwkv"}, "tokenizers of kind 'rwkv' are not supported; supported: gpt2, llama"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens must be an array of strings; it is missing"),
    "numbers for tokens": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
    "more tokens than rows": ({"tokens": [f"t{i}" for i in range(321)]}, "has 321 tokens, but its embedding 320 rows"),
    "a token twice": ({"tokens": ["a"] * 320}, "tokens appear twice in its vocabulary: 'a', 'a'"),
    "too few types": ({"token_type": [1] * 319}, "must be an array of 320 integers, one for each token"),
    "types of no kind": ({"token_type": [9] * 320}, "unknown types: 9"),
    "types that are no numbers": ({"token_type": ["1"] * 320}, "must be an array of 320 integers"),
    "types with fractions": ({"token_type": [1.5] * 320}, "must be an array of 320 integers"),
    "an id beyond the end": ({"eos_token_id": 320}, "eos_token_id is 320, but its vocabulary has only 320 tokens"),
    "an id that is no number": ({"bos_token_id": "1"}, "bos_token_id must be an integer"),
    "a merge of nothing": ({"merges": ["Ġ t", "nothing here"]}, "merge 'nothing here' (number 1 of tokenizer.ggml"),
    "an empty merge": ({"merges": [""]}, "merge '' (number 0"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges must be an array of strings"),
    "a template of no text": ({"bos_token_id": 1, "add_bos_token": 1}, "add_bos_token must be true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_vocabularies_are_refused_by_name(name: str, tmp_path: Path) -> None:
    metadata, problem = BAD[name]
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(byte_level(tmp_path / "m.gguf", **({"pre": "gpt-2"} | metadata)))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"unknown_token_id": None, "token_type": [1] * 320}, "no unknown token"),
        ({"token_type": [2, 3, 3, 6] + [1] * 316}, "has only 1 of the 256 bytes"),
        ({"scores": [0.0] * 3}, "must be an array of 320 numbers"),
        ({"scores": [float("nan")] * 320}, "must be an array of 320 numbers"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_pieces_are_refused_by_name(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    metadata = pieces_metadata(sentencepiece_model(320, 3))
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(make_gguf(tmp_path / "m.gguf", metadata=metadata))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("llama4", ["it's", "Ġ", "123", "45", ";ĊĊ", "ok"]),
        ("glm4", ["it", "'s", "Ġ", "123", "45", ";ĊĊ", "ok"]),
        ("seed-coder", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", ";", "ĊĊ", "ok"]),
        ("qwen35", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", ";ĊĊ", "ok"]),
        ("exaone4", ["it", "'s", "Ġ12345", ";", "Ċ", "Ċ", "ok"]),
    ],
)
def test_words_of_named_families(pre: str, wanted: list[str], tmp_path: Path) -> None:
    """By the patterns that llama.cpp has under these names."""
    with Checkpoint.open(byte_level(tmp_path / "m.gguf", pre)) as checkpoint:
        content = json.loads(checkpoint.text_file("tokenizer.json") or b"")
    words = tokenizers.Tokenizer.from_str(json.dumps(content)).pre_tokenizer.pre_tokenize_str("it's 12345;\n\nok")
    assert [word for word, _ in words] == wanted
