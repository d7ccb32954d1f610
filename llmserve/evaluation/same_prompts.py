"""Whether both sides of a comparison are asked the same, with the same adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmserve.builder.adapter import source_digest
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.prompts import ChoicePrompt
from llmserve.stages.preprocess import PreparedPrompt

MOST_SHOWN = 5


def require_room(
    samples: Sequence[Sample], prompts: Sequence[PreparedPrompt], max_tokens: int, engine: str, max_seq_len: int
) -> None:
    """Before anything is computed: an engine would cut conversations, refuse texts or end answers that the other side
    has whole."""
    lengths = [
        max(map(len, prompt.continued)) + 1 if isinstance(prompt, ChoicePrompt) else len(prompt.input_ids) + max_tokens
        for prompt in prompts
    ]
    too_long = [
        f"sample {sample.id}: {length} tokens"
        for sample, length in zip(samples, lengths, strict=True)
        if length > max_seq_len
    ]
    raise_problems(
        InvalidArgument,
        f"{len(too_long)} of {len(samples)} prompts with their answers are longer than the {max_seq_len} tokens that "
        f"{engine} takes (build it with a larger --max-seq-len, or lower max_input_tokens or max_tokens in the suite)",
        too_long[:MOST_SHOWN],
    )


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
        different[:MOST_SHOWN],
    )


def _is_same_prompt(expected: Answer, actual: Answer) -> bool:
    """By ids and end ids; through a server, which tells no ids, by their number."""
    if expected.prompt_digest and actual.prompt_digest:
        return expected.prompt_digest == actual.prompt_digest
    return expected.num_prompt_tokens == actual.num_prompt_tokens


def _prompt_words(answer: Answer) -> str:
    ids = f" (ids {answer.prompt_digest})" if answer.prompt_digest else ""
    return f"{answer.num_prompt_tokens} prompt tokens{ids}"


def require_same_adapter(adapter: Path, lora: Path, directory: EngineDirectory) -> None:
    """`EngineFileError` for one of another engine, `InvalidArgument` when the baseline would have another adapter."""
    sealed = SealedAdapter.open(adapter)
    sealed.require_base(directory.manifest.engine_digest)
    if source_digest(lora) != sealed.manifest.source_digest:
        raise InvalidArgument(
            f"--adapter {adapter} was not built from --lora {lora}: give the folder that it was built from, or build "
            f"it again with: llmserve adapter build {lora} --engine {directory.path}"
        )
