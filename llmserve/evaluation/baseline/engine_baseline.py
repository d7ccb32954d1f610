"""Uses another engine instead of the Hugging Face model: its answers, and its log-probs of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.identity import EngineIdentity
from llmserve.engine.machine.description import machine_name
from llmserve.engine.registry import runtime_for
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.candidates import choose_all, decide_all, engine_candidate, run_candidate
from llmserve.evaluation.prompts import ChoicePrompt
from llmserve.evaluation.reporting.report import Side
from llmserve.stages.preprocess import PreparedPrompt

Phase = Callable[[str, int], Callable[[int], None]]


def engine_facts(directory: EngineDirectory) -> dict[str, str]:
    info, identity, loss = directory.info(), EngineIdentity.of(directory.manifest), directory.manifest.loss
    return {
        "name": info.name, "target": identity.target, "architecture": info.architecture, "dtype": identity.dtype,
        "precision": identity.precision, "engine_digest": identity.digest,
        "checkpoint_digest": directory.manifest.source.digest, "kernels": runtime_for(info.target).kernels(),
        **({"rounding_loss": str(loss.divergence)} if loss else {}),
    }  # fmt: skip


async def engine_baseline(
    directory: EngineDirectory,
    samples: Sequence[Sample],
    prompts: Sequence[PreparedPrompt],
    *,
    max_tokens: int,
    concurrency: int,
    threads: int,
    phase: Phase,
) -> Side:
    """Raises `Unsupported` if the engine does not return log-probs."""
    facts = engine_facts(directory) | {
        "source": "an engine, in this run", "in_flight": str(concurrency), "machine": machine_name(),
    }  # fmt: skip
    async with engine_candidate(directory.path, max_tokens=max_tokens, threads=threads) as candidate:
        if choices := [prompt for prompt in prompts if isinstance(prompt, ChoicePrompt)]:
            progress = phase("baseline", len(samples))
            run = await choose_all(candidate, samples, choices, concurrency=concurrency, progress=progress)
            return Side(facts, run.answers, run.performance)
        run = await run_candidate(candidate, samples, concurrency=concurrency, progress=phase("baseline", len(samples)))
        tokens = [_with_end(answer, prompt, max_tokens) for answer, prompt in zip(run.answers, prompts, strict=True)]
        decisions = await decide_all(
            candidate,
            samples,
            [prompt.input_ids for prompt in prompts],
            tokens,
            concurrency=concurrency,
            progress=phase("its tokens", len(samples)),
        )
    answers = [replace(answer, decisions=told) for answer, told in zip(run.answers, decisions, strict=True)]
    return Side(facts, answers, run.performance)


def _with_end(answer: Answer, prompt: PreparedPrompt, max_tokens: int) -> tuple[int, ...]:
    """An answer shorter than the limit ended with an end token, which is a decision, too."""
    assert answer.token_ids is not None, "an engine in this process returns ids"
    has_ended = answer.num_tokens < max_tokens and prompt.end_id >= 0
    return (*answer.token_ids, prompt.end_id) if has_ended else answer.token_ids
