"""A second opinion on prompt ids: both sides of a comparison use llmserve's own stages, so wrong ids would not be
noticed. If the checkpoint has a tokenizer.json, they are compared with transformers' tokenizer and chat template.

For a tokenizer.model there is no second opinion: transformers converts it, and then treats leading spaces and the first
token differently from sentencepiece, which the stages use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmserve.errors import CheckpointError
from llmserve.evaluation.answers import Sample
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.judging.gate import Verdict
from llmserve.stages.chat import Message
from llmserve.stages.files import TextFiles
from llmserve.stages.preprocess import PreparedPrompt
from llmserve.stages.tokenizer import reads_json

MAX_NAMED = 3  # differences in a reason


@dataclass(frozen=True, slots=True)
class PromptIds:
    """One of the gate's results."""

    num_prompts: int
    differences: tuple[str, ...] = ()
    not_compared: str = ""  # why

    @property
    def group(self) -> str:
        return "prompt ids"

    @property
    def is_judged(self) -> bool:
        return not self.not_compared

    @property
    def verdict(self) -> Verdict:
        return Verdict.FAIL if self.differences else Verdict.PASS

    @property
    def reason(self) -> str:
        if not self.differences:
            return str(self)
        return (
            f"prompt ids: {len(self.differences)} of {self.num_prompts} prompts have token ids that differ from "
            f"transformers': {'; '.join(self.differences[:MAX_NAMED])}"
        )

    def __str__(self) -> str:
        """As a line of the report."""
        if self.not_compared:
            return f"not compared with transformers': {self.not_compared}"
        return f"{len(self.differences)} of {self.num_prompts} prompts have token ids that differ from transformers'"


def second_opinion(texts: Path, samples: Sequence[Sample], prompts: Sequence[PreparedPrompt]) -> PromptIds:
    """`texts`: the checkpoint's files for converting text to ids."""
    if not reads_json(TextFiles.read(texts)):
        return PromptIds(len(prompts), not_compared="the checkpoint has no tokenizer.json")
    if not hf.has_transformers():
        return PromptIds(len(prompts), not_compared="transformers is not installed")
    try:
        tokenizer = hf.HfTokenizer(texts)
        opinions = [tokenizer.ids(_asked(sample)) for sample in samples]
    except CheckpointError as error:
        return PromptIds(len(prompts), not_compared=str(error))
    found = zip(samples, prompts, opinions, strict=True)
    differences = (_difference(tokenizer, sample, prompt.input_ids, ids) for sample, prompt, ids in found)
    return PromptIds(len(prompts), tuple(filter(None, differences)))


def _asked(sample: Sample) -> str | tuple[Message, ...]:
    """The same request as in `PromptEncoder`: spaces before a choice belong to the choice."""
    return sample.prompt.rstrip() if sample.choices and isinstance(sample.prompt, str) else sample.prompt


def _difference(tokenizer: hf.HfTokenizer, sample: Sample, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """A description of the first difference; empty if there is none."""
    if tuple(ours) == tuple(theirs):
        return ""
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))

    def piece(ids: Sequence[int]) -> str:
        return f"{tokenizer.piece(ids[at])!r} ({ids[at]})" if at < len(ids) else "the end"

    return f"sample {sample.id} at position {at}, {piece(ours)} here, {piece(theirs)} there"
