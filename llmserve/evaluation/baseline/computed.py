"""Computes a baseline with the Hugging Face model; an interrupted run is resumed.

Answers are kept next to the stored baseline, as soon as each batch is done. Batches are padded to one length, so an
answer depends on the others of its batch, and only whole batches are reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from llmserve.evaluation.answers import Answer
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.baseline.stored import FORMAT, Baseline, BaselineKey, answer_from_json, answer_to_json
from llmserve.evaluation.choices import likeliest
from llmserve.evaluation.decisions import divergence
from llmserve.evaluation.judging.rounding import other_dtype
from llmserve.evaluation.kept_lines import KeptLines, kept_lines
from llmserve.evaluation.prompts import ChoicePrompt, end_ids, ids_digest
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import PreparedPrompt

Batch: TypeAlias = list[Answer]  # each with its prompt's digest
Prompt = TypeVar("Prompt", bound=PreparedPrompt)


class KeptBatches:
    """Batches of the baseline that is being computed, from earlier runs and this one."""

    def __init__(self, key: BaselineKey, environment: Mapping[str, str], lines: KeptLines[Batch]) -> None:
        self.key = key
        self.environment = environment
        self._lines = lines
        self._batches = {tuple(answer.prompt_digest for answer in batch): batch for batch in lines.earlier}

    @property
    def batch_size(self) -> int:
        return int(self.environment["batch_size"])

    def find(self, prompts: Sequence[PreparedPrompt]) -> Batch | None:
        """The answers to exactly these prompts as one batch."""
        return self._batches.get(tuple(map(ids_digest, prompts)))

    def add(self, batch: Batch) -> None:
        self._lines.add({"batch": [[answer.prompt_digest, answer_to_json(answer)] for answer in batch]})

    def remove(self) -> None:
        """Remove the file, because the baseline is stored."""
        self._lines.remove()


@contextmanager
def kept_batches(folder: Path, key: BaselineKey, environment: Mapping[str, str]) -> Iterator[KeptBatches]:
    """Raises `InvalidArgument` if another run computes the same baseline, or if the folder is not writable."""
    path = folder / f"{key.file_name}.partial"
    head = {"format": FORMAT, **asdict(key), "environment": dict(environment)}
    with kept_lines(path, head, _batch, taken="it computes the same baseline; wait until it ends") as lines:
        yield KeptBatches(key, environment, lines)


def _batch(line: Mapping[str, Any]) -> Batch:
    return [answer_from_json(digest, content) for digest, content in line["batch"]]


def compute_baseline(
    checkpoint: Path,
    kept: KeptBatches,
    prompts: Sequence[PreparedPrompt],
    *,
    max_tokens: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Baseline:
    """Run the Hugging Face model; `progress` receives the number of prompts just answered."""
    model = hf.HfModel(checkpoint, kept.key.dtype)
    postprocessor = Postprocessor.open(checkpoint)
    _generate(model, prompts[:1], 1)  # the first call includes allocations and caches

    def ask(batch: Sequence[PreparedPrompt]) -> Batch:
        found = _generate(model, batch, max_tokens)
        return [_written(prompt, answer, postprocessor) for prompt, answer in zip(batch, found, strict=True)]

    return _compute(kept, prompts, ask, progress)


def with_rounding(
    checkpoint: Path,
    baseline: Baseline,
    prompts: Sequence[PreparedPrompt],
    progress: Callable[[int], None] = lambda count: None,
) -> Baseline:
    """Add the same model's divergences in the other dtype for these answers: see `rounding`."""
    model = hf.HfModel(checkpoint, other_dtype(baseline.key.dtype))
    answers = dict(baseline.answers)
    for prompt in prompts:
        answer = answers[ids_digest(prompt)]
        others = model.decide(prompt.input_ids, [decision.token for decision in answer.decisions])
        rounding = tuple(divergence(one, other) for one, other in zip(answer.decisions, others, strict=True))
        answers[answer.prompt_digest] = replace(answer, rounding=rounding)
        progress(1)
    return replace(baseline, answers=answers)


def compute_choices(
    checkpoint: Path,
    kept: KeptBatches,
    prompts: Sequence[ChoicePrompt],
    *,
    progress: Callable[[int], None] = lambda count: None,
) -> Baseline:
    """Like `compute_baseline`, for multiple choice: the likelihood of each choice; a batch has one prompt."""
    model = hf.HfModel(checkpoint, kept.key.dtype)
    _chosen(model, prompts[0])  # the first call includes allocations and caches
    return _compute(kept, prompts, lambda batch: [_chosen(model, prompt) for prompt in batch], progress)


def _compute(
    kept: KeptBatches,
    prompts: Sequence[Prompt],
    ask: Callable[[Sequence[Prompt]], Batch],
    progress: Callable[[int], None],
) -> Baseline:
    answers: dict[str, Answer] = {}
    for start in range(0, len(prompts), kept.batch_size):
        batch = prompts[start : start + kept.batch_size]
        found = kept.find(batch)
        if found is None:
            found = ask(batch)
            kept.add(found)
        answers |= {answer.prompt_digest: answer for answer in found}
        progress(len(batch))
    return Baseline(kept.key, kept.environment, answers)


def _written(prompt: PreparedPrompt, answer: hf.HfAnswer, postprocessor: Postprocessor) -> Answer:
    ids = answer.token_ids
    return Answer(
        postprocessor.text(ids),
        len(prompt.input_ids),
        len(ids),
        answer.seconds,
        ids,
        answer.decisions,
        ids_digest(prompt),
    )


def _chosen(model: hf.HfModel, prompt: ChoicePrompt) -> Answer:
    started = time.perf_counter()
    begin = len(prompt.input_ids)
    found = model.log_likelihoods(prompt.continued, begin)
    return Answer(
        prompt.choices[likeliest(found)],
        begin,
        sum(len(ids) - begin for ids in prompt.continued),
        time.perf_counter() - started,
        prompt_digest=ids_digest(prompt),
        log_likelihoods=tuple(found),
    )


def _generate(model: hf.HfModel, batch: Sequence[PreparedPrompt], max_tokens: int) -> list[hf.HfAnswer]:
    first = batch[0]
    return model.generate(
        [prompt.input_ids for prompt in batch], max_tokens=max_tokens, end_ids=end_ids(first), pad_id=first.pad_id
    )
