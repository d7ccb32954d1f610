"""Requests of mixed lengths, and the best possible gain of batching for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.benchmark.cells import FIRST_ID


@dataclass(frozen=True, slots=True)
class Task:
    prompt: tuple[int, ...]
    new_tokens: int
    arrival_s: float = 0.0  # after the first one


def mixed_tasks(
    count: int, *, vocab: int, prompt_tokens: int = 32, shortest: int = 8, longest: int = 256, seed: int = 0
) -> list[Task]:
    """Random prompts, and answers of `shortest` to `longest` tokens. All octaves of lengths are equally likely, so most
    answers are short, and some are long."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(shortest), np.log(longest + 1), count)).astype(int)
    prompts = rng.integers(FIRST_ID, vocab, (count, prompt_tokens)).tolist()
    return [Task(tuple(prompt), int(length)) for prompt, length in zip(prompts, lengths, strict=True)]


def arriving(tasks: Sequence[Task], *, per_second: float, seed: int = 0) -> list[Task]:
    """The same tasks, arriving at random (exponential gaps), `per_second` on average."""
    gaps = np.random.default_rng(seed).exponential(1 / per_second, len(tasks))
    times = np.cumsum(gaps) - gaps[0]
    return [replace(task, arrival_s=float(time)) for task, time in zip(tasks, times, strict=True)]


def static_batches(tasks: Sequence[Task], size: int) -> list[Sequence[Task]]:
    """Batches in order of arrival; each starts when the longest answer of the previous one is complete."""
    return [tasks[begin : begin + size] for begin in range(0, len(tasks), size)]


def ideal_gain(tasks: Sequence[Task], size: int) -> float:
    """Steps of static batching, divided by the fewest steps that `size` places need: the gain if all steps cost the
    same and in-flight batching left no place empty."""
    static = sum(max(task.new_tokens for task in batch) for batch in static_batches(tasks, size))
    total = sum(task.new_tokens for task in tasks)
    return static / max(-(-total // size), max(task.new_tokens for task in tasks))
