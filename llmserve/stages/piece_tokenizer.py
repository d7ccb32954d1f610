"""Tokenizer for a sentencepiece `tokenizer.model`, as used by Baichuan, Llama 2 and Mistral.

sentencepiece encodes control symbols (`<s>`, role tokens) as ordinary characters. Chat templates and clients that write
chat markup spell special tokens as text, so these are searched first, as in transformers. Tokens added after training
(`added_tokens_decoder`, added_tokens.json) are also supported, and decode to their text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import sentencepiece

from llmserve.errors import CheckpointError
from llmserve.stages.files import TextFiles, read_json
from llmserve.stages.text import without_incomplete_character
from llmserve.stages.token_bytes import MAX_TOKENS, piece_bytes
from llmserve.stages.token_lengths import longest_piece

# A serialized `normalizer_spec { add_dummy_prefix: false }`. Appended to a model it overrides that one field, because
# protobuf merges a message that occurs twice.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
KEEPS_SPACES = b"\x1a\x04\x18\x00\x20\x00"  # and `remove_extra_whitespaces: false`


class PieceTokenizer:
    memory_per_byte = 64  # see `Tokenizer`; 57 of one letter

    def __init__(self, model: sentencepiece.SentencePieceProcessor, files: TextFiles) -> None:
        self._model = model
        self._num_pieces: int = model.vocab_size()
        special = files.special_tokens
        self._added, are_special = added_tokens(files)
        self.vocab_size = max(self._num_pieces, *(token + 1 for token in self._added.values()), 0)
        self.bos_id = self._id_of(special.get("bos_token"), model.bos_id())
        self.eos_id = self._id_of(special.get("eos_token"), model.eos_id())
        self.pad_id = self._id_of(special.get("pad_token"), model.pad_id())
        self._add_bos = bool(files.tokenizer_config.get("add_bos_token", True))
        self._add_eos = bool(files.tokenizer_config.get("add_eos_token", False))
        named = [self._id_of(text, -1) for text in (*special.values(), *files.additional_special_tokens)]
        controls = (token for token in range(self._num_pieces) if model.is_control(token))
        self._special_ids = frozenset(token for token in (*named, *controls, *are_special) if token is not None)
        texts = [*special.values(), *files.additional_special_tokens, *self._added]
        known = {text: token for text in texts if (token := self._id_of(text, -1)) is not None}
        own = (token for token in (model.unk_id(), model.bos_id(), model.eos_id()) if token >= 0)
        self._marks = {model.id_to_piece(token): token for token in own} | known
        self._right_stripping = _right_stripping(files)
        # whether text after a special token also gets the leading space, as in Llama's first tokenizers
        self._is_legacy = files.tokenizer_config.get("legacy") is not False

    @classmethod
    def load(cls, files: TextFiles) -> PieceTokenizer:
        path = files.path / "tokenizer.model"
        try:
            model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{path} is not a sentencepiece model ({error}); copy it again") from error
        return cls(model, files)

    @cached_property
    def longest_token(self) -> int | None:
        if self._right_stripping:
            return None  # such a token removes any amount of following white space
        return longest_piece(self._model.serialized_model_proto(), list(self._marks))

    def encode(self, text: str, add_special_tokens: bool = False, banned: Collection[int] = ()) -> list[int]:
        ids = self._without_specials(text, banned) if banned else self.encode_marked(text)
        if not add_special_tokens:
            return ids
        head = [self.bos_id] if self._add_bos and self.bos_id is not None else []
        tail = [self.eos_id] if self._add_eos and self.eos_id is not None else []
        return head + ids + tail

    def encode_marked(self, text: str) -> list[int]:
        ids: list[int] = []
        before = ""
        for place, part in enumerate(self._mark_pattern.split(text)):
            if part in self._marks:
                ids.append(self._marks[part])
            elif part := part.lstrip() if before in self._right_stripping else part:
                model = self._model if place == 0 or self._is_legacy else self._continuing_model
                ids += model.encode(part)
            before = part
        return ids

    @cached_property
    def _mark_pattern(self) -> re.Pattern[str]:
        """Matches any special token; of two that begin at the same place, the longer one."""
        return re.compile("(" + "|".join(map(re.escape, sorted(self._marks, key=len, reverse=True))) + ")")

    @cached_property
    def _continuing_model(self) -> sentencepiece.SentencePieceProcessor:
        """A copy that adds no space before a text."""
        proto = self._model.serialized_model_proto() + NO_DUMMY_PREFIX
        return sentencepiece.SentencePieceProcessor(model_proto=proto)

    @cached_property
    def _inner_model(self) -> sentencepiece.SentencePieceProcessor:
        """A twin that decodes what stands behind an added token: the space in front of it is kept."""
        proto = self._model.serialized_model_proto() + KEEPS_SPACES
        return sentencepiece.SentencePieceProcessor(model_proto=proto)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        hidden = self._special_ids if skip_special_tokens else frozenset()
        added = self._added_texts
        known = [i for i in ids if (0 <= i < self._num_pieces or i in added) and i not in hidden]
        if not added:
            return str(self._model.decode(known))
        parts: list[str] = []
        for text, run in groupby(known, added.get):
            if text is not None:
                parts.append(text * len(list(run)))
            else:
                parts.append((self._inner_model if parts else self._model).decode(list(run)))
        return "".join(parts)

    def decode_stable(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return without_incomplete_character(self.decode(ids, skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        if (text := self._added_texts.get(token)) is not None:
            return text.encode()
        return piece_bytes(self._model.id_to_piece(token)) if 0 <= token < self._num_pieces else b""

    def written_bytes(self) -> Sequence[bytes | None]:
        model = self._model
        silent = {token for token in range(self._num_pieces) if model.is_unknown(token) or model.is_unused(token)}
        silent = (silent - self._added_texts.keys()) | self._special_ids
        return [None if token in silent else self.token_bytes(token) or None for token in range(self.vocab_size)]

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        """Only tokens that are not pieces of the model, or that replace a piece."""
        own = range(self._num_pieces)
        changed = self._model.id_to_piece
        return {token: text for text, token in self._added.items() if token not in own or changed(token) != text}

    def _id_of(self, text: str | None, default: int) -> int | None:
        """The id of a special token's text; -1 in a sentencepiece model means none."""
        token = self._model.piece_to_id(text) if text else default
        if text and self._model.id_to_piece(token) != text:
            token = self._added.get(text, default)
        return int(token) if token >= 0 else None

    def _without_specials(self, text: str, banned: Collection[int]) -> list[int]:
        ids: list[int] = self._model.encode(text)
        if set(banned).isdisjoint(ids):
            return ids
        return [plain for token in ids for plain in (self._spelled(token) if token in banned else (token,))]

    def _spelled(self, token: int) -> list[int]:
        """A piece's spelling, character by character, with bytes for characters outside the vocabulary."""
        ids: list[int] = []
        for character in self._model.id_to_piece(token):
            single = self._model.piece_to_id(character)
            by_bytes = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode()]
            ids += by_bytes if self._model.is_unknown(single) else [single]
        return ids


def _right_stripping(files: TextFiles) -> frozenset[str]:
    """Added tokens that remove the following white space, as in Phi-3."""
    listed: dict[str, Any] = files.tokenizer_config.get("added_tokens_decoder") or {}
    return frozenset(str(entry["content"]) for entry in listed.values() if entry.get("rstrip"))


def added_tokens(files: TextFiles) -> tuple[dict[str, int], list[int]]:
    """Text -> id of tokens that a checkpoint adds to its vocabulary, and the ids of those that are special."""
    listed = files.tokenizer_config.get("added_tokens_decoder") or {}
    try:
        added = {str(text): int(token) for text, token in read_json(files.path / "added_tokens.json").items()}
        added |= {str(entry["content"]): int(token) for token, entry in listed.items()}
        special = [int(token) for token, entry in listed.items() if entry.get("special")]
        if wrong := [token for token in added.values() if not 0 <= token < MAX_TOKENS]:
            raise ValueError(f"id {wrong[0]}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{files.path}: the added tokens (added_tokens_decoder in tokenizer_config.json, added_tokens.json) cannot "
            f"be read: {error!r}; copy the files again from the checkpoint"
        ) from error
    return added, special
