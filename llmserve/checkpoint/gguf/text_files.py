"""Makes the text files of a Hugging Face folder from a GGUF file's metadata: tokenizer, chat template, end tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmserve.checkpoint.gguf.byte_level import gemma4_tokenizer_json, tokenizer_json, word_rule
from llmserve.checkpoint.gguf.encoder_tokenizers import UNIGRAM, WORD_PIECES, encoder_tokenizer_json
from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.gguf.pieces import tokenizer_model
from llmserve.checkpoint.gguf.vocabulary import MODEL_KEY, TokenType, Vocabulary, read_vocabulary
from llmserve.models.config import is_number

ENCODERS = (WORD_PIECES, UNIGRAM)
BYTE_LEVEL, PIECES, CHARACTERS, NONE = "gpt2", "llama", "gemma4", ("none", "no_vocab")
TEMPLATE_KEY = "tokenizer.chat_template"
TOOL_USE = "tool_use"  # the name of a template for conversations with tools
PIECES_CLASS = "LlamaTokenizer"
SAMPLING = {  # generation_config.json's names of keys after general.sampling
    "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "repetition_penalty": "penalty_repeat",
}  # fmt: skip
# Phi-3's special tokens, except these, remove following white space; a GGUF file does not say so
WITHOUT_STRIP = ("<unk>", "<s>", "<|endoftext|>")


def text_files(reader: MetadataReader, num_rows: int) -> dict[str, bytes]:
    """Contents by name; None if the file has no tokenizer. Problems go to `reader`."""
    kind = reader.text(MODEL_KEY, NONE[0])
    if kind in NONE:
        return {}
    if kind == BYTE_LEVEL:
        rule = word_rule(reader)
        vocabulary = read_vocabulary(reader, num_rows, adds_bos=rule.adds_bos)
        files = {"tokenizer.json": _encoded(tokenizer_json(reader, vocabulary, rule), indent=None)}
        return files | _settings(reader, vocabulary, "PreTrainedTokenizerFast")
    if kind == CHARACTERS:
        vocabulary = read_vocabulary(reader, num_rows, adds_bos=True)
        files = {"tokenizer.json": _encoded(gemma4_tokenizer_json(reader, vocabulary), indent=None)}
        return files | _settings(reader, vocabulary, "PreTrainedTokenizerFast")
    if kind == PIECES:
        vocabulary = read_vocabulary(reader, num_rows, adds_bos=True)
        return {"tokenizer.model": tokenizer_model(reader, vocabulary)} | _settings(reader, vocabulary, PIECES_CLASS)
    if kind in ENCODERS:
        vocabulary = read_vocabulary(reader, num_rows, adds_bos=False)
        files = {"tokenizer.json": _encoded(encoder_tokenizer_json(reader, vocabulary, kind), indent=None)}
        return files | _settings(reader, vocabulary, "PreTrainedTokenizerFast")
    reader.problems.append(
        f"metadata {MODEL_KEY}: tokenizers of kind {kind!r} are not supported; supported: "
        f"{', '.join((BYTE_LEVEL, PIECES, CHARACTERS, *ENCODERS))}. Or put the model's own tokenizer files next to the "
        "file, and build from the folder"
    )
    return {}


def _settings(reader: MetadataReader, vocabulary: Vocabulary, tokenizer_class: str) -> dict[str, bytes]:
    special = {name: vocabulary.tokens[token] for name, token in vocabulary.special.items()}
    strips = reader.architecture == "phi3" and tokenizer_class == PIECES_CLASS
    config: dict[str, Any] = {
        "tokenizer_class": tokenizer_class,
        **special,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token): {"content": text, "special": True, "rstrip": strips and text not in WITHOUT_STRIP}
            for token, text in vocabulary.of_type(TokenType.CONTROL).items()
        },
    }
    if reader.has(TEMPLATE_KEY):
        config["chat_template"] = template = reader.text(TEMPLATE_KEY)
        if reader.has(f"{TEMPLATE_KEY}.{TOOL_USE}"):
            named = {"default": template, TOOL_USE: reader.text(f"{TEMPLATE_KEY}.{TOOL_USE}")}
            config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    return {
        "tokenizer_config.json": _encoded(config, indent=2),
        "generation_config.json": _encoded(_generation_config(reader, vocabulary), indent=2),
    }


def _generation_config(reader: MetadataReader, vocabulary: Vocabulary) -> Mapping[str, Any]:
    found: dict[str, Any] = {
        f"{name}_id": vocabulary.special[name] for name in ("bos_token", "pad_token") if name in vocabulary.special
    }
    if vocabulary.end_ids:
        found["eos_token_id"] = list(vocabulary.end_ids)
    said = {name: reader.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    return found | {name: value for name, value in said.items() if is_number(value)}


def _encoded(content: Mapping[str, Any], *, indent: int | None) -> bytes:
    return (json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode()
