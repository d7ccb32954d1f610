"""Makes `tokenizer.model` from a vocabulary of kind `llama`: restores the sentencepiece model that it came from.

A GGUF file keeps pieces, scores and kinds, which determine the encoding together with two switches of the normalizer.
The message is sentencepiece's `ModelProto` (sentencepiece_model.proto). It is written field by field, because the
generated code in newer sentencepiece packages refuses the protobuf version that tritonclient requires.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from llmserve.checkpoint.gguf.metadata import MetadataReader
from llmserve.checkpoint.gguf.vocabulary import TokenType, Vocabulary

SPACE = "▁"
BPE = 2
NUM_BYTES = 256
VARINT, LENGTH_DELIMITED, FIXED32 = 0, 2, 5
PIECE_NAMES = {"unk_token": 45, "bos_token": 46, "eos_token": 47, "pad_token": 48}  # fields of TrainerSpec


def tokenizer_model(reader: MetadataReader, vocabulary: Vocabulary) -> bytes:
    """Problems go to `reader`."""
    types = _types(reader, vocabulary)
    pieces = b"".join(
        _message(1, _bytes(1, _spelling(text, kind).encode()), _float(2, float(score)), _integer(3, kind))
        for text, kind, score in zip(vocabulary.tokens, types, vocabulary.scores, strict=True)
    )
    has_bytes = TokenType.BYTE in types
    trainer = _message(
        2,
        _integer(3, BPE),
        _integer(4, len(types)),
        _integer(35, has_bytes),
        *(_bytes(PIECE_NAMES[name], vocabulary.tokens[token].encode()) for name, token in vocabulary.special.items()),
    )
    normalizer = _message(
        3,
        _bytes(1, b"identity"),
        _integer(3, reader.flag("tokenizer.ggml.add_space_prefix", True)),
        _integer(4, reader.flag("tokenizer.ggml.remove_extra_whitespaces", False)),
        _integer(5, True),
    )
    return pieces + trainer + normalizer


def _types(reader: MetadataReader, vocabulary: Vocabulary) -> list[int]:
    """Sentencepiece requires one unknown token, and either all bytes or none.

    Some converters mark it as a control token, and mark padding of the vocabulary as unknown.
    """
    types = list(vocabulary.types)
    unknown = vocabulary.special.get(
        "unk_token", types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else None
    )
    if unknown is None:
        reader.problems.append("its vocabulary has no unknown token (tokenizer.ggml.unknown_token_id)")
        return types
    types = [TokenType.UNUSED if kind == TokenType.UNKNOWN else kind for kind in types]
    types[unknown] = TokenType.UNKNOWN
    if types.count(TokenType.BYTE) not in (0, NUM_BYTES):
        reader.problems.append(f"its vocabulary has only {types.count(TokenType.BYTE)} of the {NUM_BYTES} bytes")
    return types


def _spelling(text: str, kind: int) -> str:
    """The converter writes spaces of user-defined tokens as spaces, and those of others as sentencepiece does."""
    return text.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else text


def _varint(value: int) -> bytes:
    return bytes(_sevens(value))


def _sevens(value: int) -> Iterator[int]:
    """Groups of seven bits, the lowest first; all bytes but the last have the eighth bit set."""
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _integer(field: int, value: int) -> bytes:
    return _key(field, VARINT) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _key(field, FIXED32) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, LENGTH_DELIMITED) + _varint(len(value)) + value


def _message(field: int, *fields: bytes) -> bytes:
    return _bytes(field, b"".join(fields))
