"""Training pairs as padded id matrices in a few fixed lengths, so that a compiled model sees few shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import sentencepiece
import torch
from torch import Tensor

from .corpus import Pair
from .tokenizer import PAD_ID, answer_ids, prompt_ids

BUCKETS = (64, 96, 128, 160)
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Example:
    ids: tuple[int, ...]  # prompt, answer, end token
    prompt_length: int

    @property
    def bucket(self) -> int:
        return next(size for size in BUCKETS if len(self.ids) <= size)


@dataclass(frozen=True, slots=True)
class Batch:
    """`ids` [B, T]; position t predicts `targets[:, t]`, which is scored if it belongs to a text or an answer."""

    ids: Tensor
    targets: Tensor
    is_text: Tensor
    is_answer: Tensor


def encode_pairs(pairs: Iterable[Pair], tokenizer: sentencepiece.SentencePieceProcessor) -> list[Example]:
    """Examples that fit the largest bucket; longer ones are left out."""
    examples = []
    for pair in pairs:
        prompt = prompt_ids(tokenizer, pair.document)
        ids = (*prompt, *answer_ids(tokenizer, pair.summary))
        if len(ids) <= BUCKETS[-1]:
            examples.append(Example(ids, len(prompt)))
    return examples


def epoch_batches(
    examples: Sequence[Example], generator: torch.Generator, *, tokens: int = TOKENS_PER_BATCH
) -> Iterator[Batch]:
    """Every example once, shuffled; a bucket's last, smaller batch is left out, to keep the number of shapes low."""
    groups: dict[int, list[Example]] = defaultdict(list)
    for index in torch.randperm(len(examples), generator=generator).tolist():
        groups[examples[index].bucket].append(examples[index])
    chunks = []
    for bucket, members in sorted(groups.items()):
        size = min(tokens // bucket, len(members))
        chunks += [members[i : i + size] for i in range(0, len(members) - size + 1, size)]
    for index in torch.randperm(len(chunks), generator=generator).tolist():
        yield make_batch(chunks[index])


def endless_batches(examples: Sequence[Example], seed: int, *, tokens: int = TOKENS_PER_BATCH) -> Iterator[Batch]:
    """Batches of `tokens` positions, padding included."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from epoch_batches(examples, generator, tokens=tokens)


def make_batch(examples: Sequence[Example]) -> Batch:
    """Right-padded to the bucket of the longest example."""
    width = max(example.bucket for example in examples)
    ids = torch.full((len(examples), width), PAD_ID)
    position = torch.arange(width)
    lengths = torch.tensor([[len(example.ids)] for example in examples])
    prompts = torch.tensor([[example.prompt_length] for example in examples])
    for row, example in zip(ids, examples, strict=True):
        row[: len(example.ids)] = torch.tensor(example.ids)
    has_target = position + 1 < lengths
    is_answer = has_target & (position + 1 >= prompts)
    return Batch(ids, ids.roll(-1, 1), has_target & ~is_answer, is_answer)
