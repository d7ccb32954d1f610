"""Whether both sides of a comparison were asked the same."""

from __future__ import annotations

from collections.abc import Sequence

from llmserve.errors import InvalidArgument, raise_problems
from llmserve.evaluation.answers import Answer, Sample


def require_same_prompts(samples: Sequence[Sample], baseline: Sequence[Answer], engine: Sequence[Answer]) -> None:
    """A comparison counts only on the same prompts: an engine with another tokenizer or chat format is refused."""
    different = [
        f"sample {sample.id}: {_prompt_words(expected)} for the baseline, {_prompt_words(actual)} for the engine"
        for sample, expected, actual in zip(samples, baseline, engine, strict=True)
        if not _is_same_prompt(expected, actual)
    ]
    raise_problems(
        InvalidArgument,
        "the engine and the baseline get different prompts (check tokenizer, chat format, end token and limits)",
        different[:5],
    )


def _is_same_prompt(expected: Answer, actual: Answer) -> bool:
    """By ids and end ids; through a server, which tells no ids, by their number."""
    if expected.prompt_digest and actual.prompt_digest:
        return expected.prompt_digest == actual.prompt_digest
    return expected.num_prompt_tokens == actual.num_prompt_tokens


def _prompt_words(answer: Answer) -> str:
    ids = f" (ids {answer.prompt_digest})" if answer.prompt_digest else ""
    return f"{answer.num_prompt_tokens} prompt tokens{ids}"
