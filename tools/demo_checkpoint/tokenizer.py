"""The sentencepiece model: BPE with byte fallback, and Baichuan2's layout of reserved ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from .corpus import Pair

VOCAB_SIZE = 5120
PAD_ID, BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = 0, 1, 2, 195, 196
FIRST_RESERVED_ID = 89  # <reserved_0>; so 195 is <reserved_106>, the user, and 196 <reserved_107>, the assistant
PROMPT = "Summarize:\n"


def reserved_pieces() -> list[str]:
    """Names of ids 3 to 196."""
    unused = [f"<unused_{i}>" for i in range(EOS_ID + 1, FIRST_RESERVED_ID)]
    return unused + [f"<reserved_{i - FIRST_RESERVED_ID}>" for i in range(FIRST_RESERVED_ID, ASSISTANT_ID + 1)]


def train_tokenizer(pairs: Iterable[Pair], path: Path, *, vocab_size: int = VOCAB_SIZE, threads: int = 2) -> None:
    """Write `tokenizer.model`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(pairs),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            unk_id=PAD_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            control_symbols=reserved_pieces(),
            num_threads=threads,
            minloglevel=2,
        )


def _lines(pairs: Iterable[Pair]) -> Iterator[str]:
    for pair in pairs:
        yield pair.summary
        yield from pair.document.splitlines()


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def prompt_ids(tokenizer: sentencepiece.SentencePieceProcessor, document: str) -> list[int]:
    """[user] prompt and document [assistant]; no bos."""
    return [USER_ID, *tokenizer.encode(PROMPT + document), ASSISTANT_ID]


def answer_ids(tokenizer: sentencepiece.SentencePieceProcessor, summary: str) -> list[int]:
    return [*tokenizer.encode(summary), EOS_ID]
