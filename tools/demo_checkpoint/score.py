"""Greedy summaries of the evaluation pairs and their ROUGE, directly from a checkpoint folder's weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import sentencepiece
import torch
from rouge_score.rouge_scorer import RougeScorer
from safetensors.torch import load_file

from .corpus import Pair
from .model import ModelConfig, TinyBaichuan
from .tokenizer import EOS_ID, PAD_ID, load_tokenizer, prompt_ids

MAX_NEW_TOKENS = 32
ROUGE = ("rouge1", "rouge2", "rougeL")


def load_checkpoint(path: Path) -> tuple[TinyBaichuan, sentencepiece.SentencePieceProcessor]:
    """The exported weights in float32."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    model = TinyBaichuan(
        ModelConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
        )
    )
    tensors = load_file(path / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return model.eval(), load_tokenizer(path / "tokenizer.model")


@torch.no_grad()
def generate(model: TinyBaichuan, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy answers to all prompts at once; recomputes everything at each step, which is fast enough here."""
    width = max(map(len, prompts)) + MAX_NEW_TOKENS
    ids = torch.full((len(prompts), width), PAD_ID)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    open_rows = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        best = model(ids[:, : int(lengths.max())])[rows, lengths - 1].argmax(-1)
        open_rows &= best != EOS_ID
        if not open_rows.any():
            break
        ids[rows[open_rows], lengths[open_rows]] = best[open_rows]
        lengths = lengths + open_rows
    return [row[len(prompt) : end].tolist() for row, prompt, end in zip(ids, prompts, lengths.tolist(), strict=True)]


def summaries(path: Path, pairs: Sequence[Pair], *, batch_size: int = 50) -> list[str]:
    """The checkpoint's summary of each pair's document."""
    model, tokenizer = load_checkpoint(path)
    prompts = [prompt_ids(tokenizer, pair.document) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: len(prompts[i]))
    texts = [""] * len(pairs)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, answer in zip(chosen, generate(model, [prompts[i] for i in chosen]), strict=True):
            texts[index] = tokenizer.decode(answer)
    return texts


def rouge(texts: Sequence[str], pairs: Sequence[Pair]) -> dict[str, float]:
    """Mean F x 100, with stemming."""
    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(pair.summary, text) for pair, text in zip(pairs, texts, strict=True)]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}
