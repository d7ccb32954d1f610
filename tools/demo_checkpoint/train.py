"""The training loop: a fixed number of steps, or as many as fit a time limit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from .batches import TOKENS_PER_BATCH, Batch, Example, endless_batches, make_batch
from .model import ModelConfig, TinyBaichuan
from .optimizer import Optimizer

WARMUP_STEPS = 60
TEXT_WEIGHT_FIRST, TEXT_WEIGHT_LAST = 0.5, 0.1  # of a document's tokens; an answer's have 1.0
SCORED_FRACTION = 3 / 8  # share of a batch's positions: every answer token and a sample of the documents' tokens
VALIDATION_EXAMPLES = 512
REPORT_EVERY = 100
SAVE_EVERY = 250


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """`steps` makes a run bitwise repeatable; with `minutes` alone, the schedule follows the clock."""

    minutes: float = 60.0
    steps: int = 0  # 0: as many as `minutes` allows
    device: str = "cpu"
    threads: int = 2
    seed: int = 0
    autocast: bool = False  # bfloat16 arithmetic, if the processor has it
    compile: bool = False
    tokens_per_batch: int = TOKENS_PER_BATCH  # padding included
    dropout: float = 0.05  # the pairs are seen several times
    state: Path | None = None  # file in which a run with `steps` keeps its state, to continue after an interruption


@dataclass(frozen=True, slots=True)
class TrainReport:
    steps: int
    tokens: int  # without padding
    seconds: float
    first_loss: float
    last_loss: float
    validation_loss: float  # nats per answer token


def train(
    examples: Sequence[Example], config: ModelConfig, options: TrainOptions, *, say: Callable[[str], None] = print
) -> tuple[TinyBaichuan, TrainReport]:
    """A trained model; some of the examples are held out for the validation loss.

    With `options.state` and `options.steps`, an interrupted run continues from its last saved state, and ends with the
    same result as without the interruption.
    """
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    held_out = min(VALIDATION_EXAMPLES, len(examples) // 10)
    validation = examples[:held_out]
    seen = set(validation)  # some examples are repeated
    training = [example for example in examples[held_out:] if example not in seen]
    model = TinyBaichuan(replace(config, dropout=options.dropout)).to(options.device)
    loss_of = torch.compile(_loss, dynamic=False) if options.compile else _loss
    optimizer = Optimizer(model)
    started, tokens, losses = time.monotonic(), 0, list[float]()
    step = _restore(options, model, optimizer)
    batches = endless_batches(training, options.seed, tokens=options.tokens_per_batch)
    for batch in itertools.islice(batches, step, None):
        elapsed = (time.monotonic() - started) / (60 * options.minutes)
        progress = step / options.steps if options.steps else elapsed
        if progress >= 1:
            break
        losses.append(_train_step(model, loss_of, optimizer, batch, _Schedule(step, progress), options))
        tokens += int((batch.is_text | batch.is_answer).sum())
        step += 1
        if options.state and options.steps and step % SAVE_EVERY == 0:
            _save(options.state, step, model, optimizer)
        if step % REPORT_EVERY == 0:
            rate = tokens / (time.monotonic() - started)
            say(f"step {step}  progress {progress:.3f}  loss {losses[-1]:.3f}  {rate:,.0f} tokens/s")
        if step % (10 * REPORT_EVERY) == 0:
            say(f"step {step}  validation loss {validation_loss(model, validation):.4f}")
    first, last = (losses[0], losses[-1]) if losses else (math.nan, math.nan)
    report = TrainReport(step, tokens, time.monotonic() - started, first, last, validation_loss(model, validation))
    say(str(report))
    return model, report


def _save(path: Path, step: int, model: TinyBaichuan, optimizer: Optimizer) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state(), "random": torch.get_rng_state()}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _restore(options: TrainOptions, model: TinyBaichuan, optimizer: Optimizer) -> int:
    """Returns the number of steps that are already done."""
    if not options.state or not options.steps or not options.state.exists():
        return 0
    state = torch.load(options.state, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.restore(state["optimizer"])
    torch.set_rng_state(state["random"])
    step: int = state["step"]
    return step


@dataclass(frozen=True, slots=True)
class _Schedule:
    step: int
    progress: float

    @property
    def learning_rate(self) -> float:
        """Fraction of the full rate: linear warm-up, then cosine to zero."""
        return min(1.0, (self.step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * self.progress))

    @property
    def text_weight(self) -> float:
        return TEXT_WEIGHT_FIRST + (TEXT_WEIGHT_LAST - TEXT_WEIGHT_FIRST) * self.progress


def _train_step(
    model: TinyBaichuan,
    loss_of: Callable[..., torch.Tensor],
    optimizer: Optimizer,
    batch: Batch,
    schedule: _Schedule,
    options: TrainOptions,
) -> float:
    model.train()
    positions, weights = _scored_positions(batch, schedule.text_weight)
    targets = batch.targets.flatten()[positions]
    with torch.autocast(options.device.split(":")[0], torch.bfloat16, enabled=options.autocast):
        loss = loss_of(model, *(tensor.to(options.device) for tensor in (batch.ids, positions, targets, weights)))
    torch.autograd.backward(loss)
    optimizer.step(schedule.learning_rate)
    return float(loss.detach())


def _scored_positions(batch: Batch, text_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A fixed number of flat positions and their weights: the head at every position takes a third of a step."""
    is_answer, is_text = batch.is_answer.flatten(), batch.is_text.flatten()
    count = int(SCORED_FRACTION * is_text.numel())
    priority = torch.rand(is_text.shape) * is_text + 2 * is_answer
    positions = priority.topk(count).indices
    sampled = int(is_text[positions].sum())
    weights = is_answer + text_weight * is_text * (int(is_text.sum()) / max(1, sampled))
    return positions, weights[positions]


def _loss(
    model: TinyBaichuan, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted mean negative log-likelihood of the targets at some flat positions of `ids` [B, T]."""
    logits = model.head(model.hidden(ids).flatten(0, 1)[positions]).float()
    return (functional.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()


@torch.no_grad()
def validation_loss(model: TinyBaichuan, examples: Sequence[Example], *, batch_size: int = 32) -> float:
    """Mean negative log-likelihood per answer token, in nats; NaN without examples."""
    model.eval()
    device = next(model.parameters()).device
    total, count = 0.0, 0
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), batch_size):
        batch = make_batch(ordered[start : start + batch_size])
        positions = batch.is_answer.flatten().nonzero().flatten()
        targets = batch.targets.flatten()[positions]
        tensors = (batch.ids, positions, targets, torch.ones(len(positions)))
        total += float(_loss(model, *(tensor.to(device) for tensor in tensors))) * len(positions)
        count += len(positions)
    return total / count if count else math.nan
