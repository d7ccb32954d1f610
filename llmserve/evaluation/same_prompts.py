"""Checks that both sides of a comparison get the same prompts, with the same adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmserve.builder.adapter import source_digest
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.prompts import ChoicePrompt, ids_digest
from llmserve.stages.preprocess import PreparedPrompt

MOST_SHOWN = 5
Told = tuple[int, str]  # of a prompt: the number of its tokens, and their digest if known


def require_room(
    samples: Sequence[Sample], prompts: Sequence[PreparedPrompt], max_tokens: int, engine: str, max_seq_len: int
) -> None:
    """Check before anything is computed: an engine would truncate conversations, refuse texts or end answers early that
    the other side has in full."""
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
        f"{len(too_long)} of {len(samples)} prompts with their answers exceed the {max_seq_len} tokens that "
        f"{engine} takes (build it with a larger --max-seq-len, or lower max_input_tokens or max_tokens in the suite)",
        too_long[:MOST_SHOWN],
    )


def require_same_prompts(samples: Sequence[Sample], baseline: Sequence[Answer], engine: Sequence[Answer]) -> None:
    """Refuse a comparison of different prompts, such as with an engine that has another tokenizer or chat format."""
    told = [[(answer.num_prompt_tokens, answer.prompt_digest) for answer in side] for side in (baseline, engine)]
    _require_same(samples, *told)


def require_same_ids(
    samples: Sequence[Sample], baseline: Sequence[PreparedPrompt], engine: Sequence[PreparedPrompt]
) -> None:
    """The same, before anything is computed."""
    _require_same(samples, *([(len(p.input_ids), ids_digest(p)) for p in side] for side in (baseline, engine)))


def _require_same(samples: Sequence[Sample], baseline: Sequence[Told], engine: Sequence[Told]) -> None:
    different = [
        f"sample {sample.id}: {_in_words(expected)} for the baseline, but {_in_words(actual)} for the engine"
        for sample, expected, actual in zip(samples, baseline, engine, strict=True)
        if not _is_same(expected, actual)
    ]
    raise_problems(
        InvalidArgument,
        "the engine and the baseline get different prompts (check tokenizer, chat format, end token and limits)",
        different[:MOST_SHOWN],
    )


def _is_same(expected: Told, actual: Told) -> bool:
    """Compare ids and end ids; for a server, which does not return ids, their number."""
    return expected[1] == actual[1] if expected[1] and actual[1] else expected[0] == actual[0]


def _in_words(told: Told) -> str:
    return f"{told[0]} prompt tokens" + (f" (ids {told[1]})" if told[1] else "")


def require_same_adapter(adapter: Path, lora: Path, directory: EngineDirectory) -> None:
    """`EngineFileError` for another engine's adapter, `InvalidArgument` if the baseline would have another adapter."""
    sealed = SealedAdapter.open(adapter)
    sealed.require_base(directory.manifest.engine_digest)
    if source_digest(lora) != sealed.manifest.source_digest:
        raise InvalidArgument(
            f"--adapter {adapter} was not built from --lora {lora}; give the folder that it was built from, or rebuild "
            f"it with: llmserve adapter build {lora} --engine {directory.path}"
        )
