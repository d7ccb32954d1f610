"""The text files of an engine directory or a checkpoint: which ones exist, and their contents.

The stages read these files; all are optional except a tokenizer:
    tokenizer.model | tokenizer.json         the vocabulary
    tokenizer_config.json                    class, special tokens, add_bos_token, chat_template
    special_tokens_map.json                  special tokens that tokenizer_config.json leaves out
    pair_template.txt                        what a query and a document become, for networks that score pairs
    chat_template.jinja                      a chat template in a file of its own (wins over the one in the config)
    additional_chat_templates/tool_use.jinja    that of conversations with tools, beside it
    chat_template.json                       that of a processor of images, where there is no other
    generation_config.json                   end, padding and role token ids
    hf_config.json (engine directory), config.json (checkpoint)    the same ids, and the position limit
    config.json (engine directory)           build_config.max_seq_len
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmserve.errors import CheckpointError, NotFound
from llmserve.models.registry import position_limit

MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
PAIR_TEMPLATE, TEMPLATE_FILE, PROCESSOR_FILE = "pair_template.txt", "chat_template.jinja", "chat_template.json"
TOOL_FILE = "additional_chat_templates/tool_use.jinja"
# That of Qwen3-Reranker's model card
QWEN3_PAIR = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Contents of the JSON files; empty if a file does not exist."""

    path: Path
    tokenizer_config: Mapping[str, Any]
    special_tokens_map: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    hf_config: Mapping[str, Any]
    engine_config: Mapping[str, Any]
    chat_template_file: str
    pair_template_file: str = ""
    tool_template_file: str = ""
    template_place: str = ""  # source of the chat template; empty: a request

    @classmethod
    def read(cls, path: Path) -> TextFiles:
        if not path.is_dir():
            raise NotFound(
                f"no tokenizer directory {path}; an engine directory has a tokenizer, so leave tokenizer_dir "
                "(--tokenizer-dir) out, or name a checkpoint's folder"
            )
        config, template_file = read_json(path / "config.json"), read_text(path / TEMPLATE_FILE)
        tokenizer_config = read_json(path / "tokenizer_config.json")
        place = TEMPLATE_FILE if template_file else "tokenizer_config.json"
        if not template_file and not tokenizer_config.get("chat_template"):
            template_file = str(read_json(path / PROCESSOR_FILE).get("chat_template") or "")
            place = PROCESSOR_FILE
        is_engine = "build_config" in config
        return cls(
            path,
            tokenizer_config=tokenizer_config,
            special_tokens_map=read_json(path / "special_tokens_map.json"),
            generation_config=read_json(path / "generation_config.json"),
            hf_config=read_json(path / "hf_config.json") if is_engine else config,
            engine_config=config if is_engine else {},
            chat_template_file=template_file,
            pair_template_file=read_text(path / PAIR_TEMPLATE),
            tool_template_file=read_text(path / TOOL_FILE),
            template_place=str(path / place),
        )

    @property
    def tokenizer_class(self) -> str:
        return str(self.tokenizer_config.get("tokenizer_class") or "")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Name (`bos_token`, ...) -> its text."""
        merged = {**self.special_tokens_map, **{k: v for k, v in self.tokenizer_config.items() if v is not None}}
        return {name: _content(merged[name]) for name in SPECIAL_NAMES if merged.get(name)}

    @property
    def additional_special_tokens(self) -> list[str]:
        listed = self.tokenizer_config.get("additional_special_tokens") or self.special_tokens_map.get(
            "additional_special_tokens"
        )
        return [_content(token) for token in listed or ()]

    @property
    def pair_template(self) -> str:
        """The template for a query and a document if the network scores by two answers; empty otherwise."""
        pooling = self.engine_config.get("pretrained_config", {}).get("pooling") or {}
        return self.pair_template_file or (QWEN3_PAIR if pooling.get("answers") else "")

    @property
    def chat_template(self) -> str:
        """The jinja template; if there are several named ones, the one called `default`; empty if there is none."""
        return self._template("default")

    @property
    def tool_template(self) -> str:
        """The template for conversations with tools, named `tool_use`, if it is different."""
        return self.tool_template_file or self._template("tool_use") or self.chat_template

    def with_template(self, template: str, place: str) -> TextFiles:
        """With this template instead of all of the checkpoint's."""
        return replace(self, chat_template_file=template, tool_template_file="", template_place=place)

    def _template(self, name: str) -> str:
        template = self.chat_template_file or self.tokenizer_config.get("chat_template") or ""
        if isinstance(template, list):
            template = next((entry["template"] for entry in template if entry.get("name") == name), "")
        elif name != "default":
            template = ""
        return str(template)

    @property
    def max_seq_len(self) -> int | None:
        """Longest prompt and output: the engine's limit, else the checkpoint's, as in a build."""
        built = self.engine_config.get("build_config", {}).get("max_seq_len")
        return int(built) if built else position_limit(self.hf_config)

    @property
    def vocab_size(self) -> int | None:
        """Number of ids in the network: the engine's, else the checkpoint's."""
        size = self.engine_config.get("pretrained_config", {}).get("vocab_size", self.hf_config.get("vocab_size"))
        return size if isinstance(size, int) else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id entry such as `eos_token_id`: one id, a list or missing."""
        hf_config = "hf_config.json" if self.engine_config else "config.json"
        for file, config in (("generation_config.json", self.generation_config), (hf_config, self.hf_config)):
            if (value := config.get(name)) is not None:
                ids = value if isinstance(value, list) else [value]
                if not all(type(token) is int for token in ids):
                    raise CheckpointError(
                        f"{self.path / file}: {name} must be a token id, which is an integer, or a list of them, "
                        f"got {value!r}"
                    )
                return tuple(ids)
        return ()


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    if not text:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); copy it again from the checkpoint") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content


def read_text(path: Path) -> str:
    """The file's text, or an empty string if the file does not exist."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _content(token: Any) -> str:
    """A special token is given as its text, or as an object with its text and matching rules."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def resolve_path(path: str, model_dir: Path) -> Path:
    """A path in a model's config.pbtxt: absolute, below `model_dir` (`<repository>/<model>`, Triton's
    $$TRITON_MODEL_DIRECTORY), or relative to the model repository's parent, else to the working directory (the first
    that exists). If neither exists, the first is returned, so that the error on opening it names a path.
    """
    if path.startswith(MODEL_DIRECTORY):
        return model_dir.absolute() / path.removeprefix(MODEL_DIRECTORY).lstrip("/")
    candidates = [model_dir.absolute().parent.parent / path, Path.cwd() / path]
    return next((candidate for candidate in candidates if candidate.exists()), candidates[0])
