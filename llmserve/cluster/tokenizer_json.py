"""Converts a sentencepiece model to tokenizer.json, the only format that Dynamo reads.

The conversion follows transformers' slow tokenizers: pairs of pieces that form a piece are merged, better pieces first.
It may differ from the model, so both are compared on the vocabulary and on difficult texts; a difference is an error.
The comparison excludes bytes that form no character: with tokenizer.json, a run of bytes with one such byte decodes to
replacement characters only.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sentencepiece import sentencepiece_model_pb2 as sentencepiece_format
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from llmserve.errors import CheckpointError, Unsupported
from llmserve.stages.files import TextFiles
from llmserve.stages.piece_tokenizer import PieceTokenizer, added_tokens

FORMAT: Any = sentencepiece_format  # its classes are created at import, so they have no types
Model: TypeAlias = Any  # a ModelProto of it
SPACE = "\u2581"  # sentencepiece's character for a space
NUM_TEXTS, NUM_ANSWERS = 400, 400
MOST_SHOWN = 3
AWKWARD = (
    "", " ", "  two  spaces ", "\n\n\tdef f(x):\n    return x  # \u00e9\u00e8", "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\U0001f600\u200d\U0001f469", "a\u0301 e\u0300", "\u0000\u0001\u007f", "\u2581 \u2581\u2581",
    "1234567890 3.14159e-10", "\ufb01 \u2167 \u338f \uff46\uff55\uff4c\uff4c", "\u202eright\u202c \ufeff", "<0x41>",
)  # fmt: skip


def converted(path: Path) -> Tokenizer:
    """Convert the folder's tokenizer.model. `Unsupported` if it is not BPE, `CheckpointError` if the result differs."""
    files = TextFiles.read(path)
    own = PieceTokenizer.load(files)
    model = FORMAT.ModelProto()
    model.ParseFromString((path / "tokenizer.model").read_bytes())
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise Unsupported(
            f"{path / 'tokenizer.model'} is not a BPE model; put the checkpoint's tokenizer.json beside it for Dynamo"
        )
    made = _converted(model, files)
    if differences := list(_differences(own, made, model, added_tokens(files)[0])):
        shown = "; ".join(differences[:MOST_SHOWN])
        raise CheckpointError(
            f"tokenizer.json made of {path / 'tokenizer.model'} differs from it in {len(differences)} texts ({shown}); "
            "put one that comes with the checkpoint beside it"
        )
    return made


def _converted(model: Model, files: TextFiles) -> Tokenizer:
    pieces, kinds = model.pieces, FORMAT.ModelProto.SentencePiece
    vocabulary = {each.piece: place for place, each in enumerate(pieces)}
    unknown = next((each.piece for each in pieces if each.type == kinds.UNKNOWN), None)
    made = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(model, vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=model.trainer_spec.byte_fallback,
        )
    )
    rules = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    special = [each.piece for each in pieces if each.type in (kinds.CONTROL, kinds.UNKNOWN)]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [each.piece for each in pieces if each.type == kinds.USER_DEFINED]
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    added, are_special = added_tokens(files)
    named = {*files.special_tokens.values(), *files.additional_special_tokens}
    for text in sorted(added.keys() - vocabulary.keys(), key=added.__getitem__):
        is_special = text in named or added[text] in are_special
        made.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    if files.tokenizer_config.get("add_bos_token", True) and (begin := files.special_tokens.get("bos_token")):
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, vocabulary[begin])]
        )
    return made


def _merges(model: Model, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Merges: better pieces first; several merges to one piece are in the order of the ids of their halves."""
    normal = FORMAT.ModelProto.SentencePiece.NORMAL
    found = []
    for each in model.pieces:
        if each.type != normal:
            continue
        halves = ((each.piece[:at], each.piece[at:]) for at in range(1, len(each.piece)))
        pairs = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-each.score, pair) for pair in pairs]
    return [pair for _, pair in sorted(found, key=lambda each: each[0])]


def _differences(own: PieceTokenizer, made: Tokenizer, model: Model, added: Collection[str]) -> Iterator[str]:
    for text in (*_texts(model), *(f"a{text}" for text in added)):
        wanted, found = own.encode(text), made.encode(text, add_special_tokens=False).ids
        if wanted != found:
            yield f"{text!r} is {wanted} and becomes {found}"
        elif own.decode(wanted) != made.decode(found, skip_special_tokens=True):
            yield f"{text!r} comes back as {made.decode(found, skip_special_tokens=True)!r}"
    for ids in _answers(model):
        if own.decode(ids) != made.decode(ids, skip_special_tokens=True):
            yield f"{ids} is {own.decode(ids)!r} and becomes {made.decode(ids, skip_special_tokens=True)!r}"


def _texts(model: Model) -> Iterator[str]:
    """Difficult texts, every piece, and random sequences of pieces."""
    normal = FORMAT.ModelProto.SentencePiece.NORMAL
    words = [each.piece.replace(SPACE, " ") for each in model.pieces if each.type == normal]
    yield from AWKWARD
    yield from words
    choice = random.Random(0)
    for _ in range(NUM_TEXTS):
        yield "".join(choice.choices([*words, *AWKWARD], k=choice.randint(2, 40)))


def _answers(model: Model) -> Iterator[Sequence[int]]:
    """Random ids, as a network may choose them, including special ones."""
    byte = FORMAT.ModelProto.SentencePiece.BYTE
    ids = [place for place, each in enumerate(model.pieces) if each.type != byte]
    choice = random.Random(1)
    for _ in range(NUM_ANSWERS):
        yield choice.choices(ids, k=choice.randint(1, 20))
