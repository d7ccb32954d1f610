"""Defects that are planted into a server's process, by what starts it: `command` with the name of one of them."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmserve.backends.tensorrtllm import backend
from llmserve.backends.tensorrtllm.request_tensors import TensorRequest, read_request
from llmserve.core import SamplingParams
from llmserve.engine.base import StepResult
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.frontends.text.answers.generation import Arrays
from llmserve.frontends.text.answers.log_probs import Scored, scored_output
from llmserve.frontends.text.openai import chat, completions
from llmserve.scheduler.plan import StepPlan
from llmserve.stages.postprocess import Postprocessor

PROGRAM = "from tests.evaluation.served import defects; defects.{}; from llmserve.cli.owned_server import main; main()"
STEP_S = 0.003


def command(plant: str) -> tuple[str, ...]:
    """`plant` is a call of a function below, as Python."""
    return sys.executable, "-c", PROGRAM.format(plant)


def swap_blocks() -> None:
    """Where there are two sequences, the KV blocks that they write change places, in every other step. Steps take as
    long as a larger network's, so that requests meet."""
    step, numbers = CpuRunner.step, itertools.count()

    def swapping(self: CpuRunner, plan: StepPlan) -> StepResult:
        time.sleep(STEP_S)
        if len(plan.chunks) < 2 or next(numbers) % 2:
            return step(self, plan)
        one, other, *rest = plan.chunks
        swapped = (
            replace(one, block_table=[*one.block_table[:-1], other.block_table[-1]]),
            replace(other, block_table=[*other.block_table[:-1], one.block_table[-1]]),
        )
        return step(self, StepPlan((*swapped, *rest)))

    CpuRunner.step = swapping  # type: ignore[method-assign]


def drop_bytes(*, only_streamed: bool) -> None:
    """Letters of several bytes are lost."""
    text = Postprocessor.text

    def dropping(
        self: Postprocessor, ids: Sequence[int], window: Sequence[int] = (), *, final: bool = True, tail: str = ""
    ) -> str:
        found = text(self, ids, window, final=final, tail=tail)
        is_streamed = bool(window) or not final
        return found if only_streamed and not is_streamed else "".join(letter for letter in found if letter.isascii())

    Postprocessor.text = dropping  # type: ignore[method-assign]


def ignore_seed(*, draws_anew: bool) -> None:
    """All requests have the same seed, or each another one."""
    numbers = itertools.count()

    def seedless(inputs: Any, **limits: Any) -> TensorRequest:
        read = read_request(inputs, **limits)
        sampling = replace(read.generate.sampling, seed=next(numbers) if draws_anew else 5)
        return replace(read, generate=replace(read.generate, sampling=sampling))

    backend.read_request = seedless  # type: ignore[attr-defined]


def apply_temperature_twice() -> None:
    """Only visible in what is drawn at another temperature than 0 and 1."""
    _sample_otherwise(lambda sampling: replace(sampling, temperature=sampling.temperature**2))


def lose_a_penalty() -> None:
    _sample_otherwise(lambda sampling: replace(sampling, repetition_penalty=1.0))


def _sample_otherwise(change: Callable[[SamplingParams], SamplingParams]) -> None:
    def changed(inputs: Any, **limits: Any) -> TensorRequest:
        read = read_request(inputs, **limits)
        return replace(read, generate=replace(read.generate, sampling=change(read.generate.sampling)))

    backend.read_request = changed  # type: ignore[attr-defined]


def change_log_prob(*, at: int) -> None:
    """The log-prob of one token, over /v1, by its last bit: the first one of the piece of that number."""
    numbers = itertools.count()

    def changing(arrays: Arrays) -> list[Scored]:
        first, *others = scored_output(arrays)
        if next(numbers) == at:
            first = replace(first, log_prob=float(np.nextafter(np.float32(first.log_prob), np.float32(0))))
        return [first, *others]

    chat.scored_output = changing  # type: ignore[attr-defined]
    completions.scored_output = changing  # type: ignore[attr-defined]


def withhold_log_probs() -> None:
    """Over /v1."""
    chat.scored_output = lambda arrays: []  # type: ignore[attr-defined]
    completions.scored_output = lambda arrays: []  # type: ignore[attr-defined]


def die_after(num_requests: int) -> None:
    """In the middle of an answer."""
    numbers = itertools.count()

    def mortal(inputs: Any, **limits: Any) -> TensorRequest:
        if next(numbers) == num_requests:
            print("out of luck", flush=True)
            os._exit(9)
        return read_request(inputs, **limits)

    backend.read_request = mortal  # type: ignore[attr-defined]


def serve_instead(engine: str) -> None:
    """Another engine than was asked for."""
    sys.argv[1] = engine
