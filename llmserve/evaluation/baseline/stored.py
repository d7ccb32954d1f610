"""Answers of the Hugging Face model, computed once and stored, so that a release check needs no torch.

One file per checkpoint (weights, and the files around its text), suite and dtype, named by their digests. In the file,
answers are found by their prompt's ids and end ids, so a shorter run of the same suite uses the same file. Times were
measured when the baseline was computed, on the machine named in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from llmserve.engine.machine.description import machine_name
from llmserve.errors import InvalidArgument, Unsupported
from llmserve.evaluation.answers import Answer
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.decisions import pack, unpack
from llmserve.evaluation.prompts import ids_digest
from llmserve.stages.preprocess import PreparedPrompt

FORMAT = 3
DIGEST_CHARS = 16  # characters of each digest in the file's name


@dataclass(frozen=True, slots=True)
class BaselineKey:
    """Everything that a stored answer depends on."""

    checkpoint_digest: str  # config.json and the weights
    text_digest: str  # tokenizer, special tokens and generation_config.json
    suite_digest: str
    dtype: str

    @property
    def file_prefix(self) -> str:
        """The common prefix of files that differ only in dtype."""
        digests = (self.checkpoint_digest, self.text_digest, self.suite_digest)
        return "".join(f"{digest[:DIGEST_CHARS]}-" for digest in digests)

    @property
    def file_name(self) -> str:
        return f"{self.file_prefix}{self.dtype}.json"


@dataclass(frozen=True, slots=True)
class Baseline:
    key: BaselineKey
    environment: Mapping[str, str]  # machine and versions that computed it
    answers: Mapping[str, Answer]  # by `ids_digest` of the prompt

    def select(self, prompts: Sequence[PreparedPrompt]) -> list[Answer] | None:
        """The answers to these prompts, in order; None if any is missing."""
        found = [self.answers.get(ids_digest(prompt)) for prompt in prompts]
        return [answer for answer in found if answer] if all(found) else None

    def merged_with(self, older: Baseline | None) -> Baseline:
        """Add the older baseline's answers to other prompts, if the same machine and versions computed them."""
        if older is None or older.environment != self.environment:
            return self
        return replace(self, answers={**older.answers, **self.answers})

    def save(self, folder: Path) -> Path:
        answers = {name: answer_to_json(answer) for name, answer in self.answers.items()}
        head = {"format": FORMAT, **asdict(self.key), "environment": dict(self.environment)}
        lines = [f"  {json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items()]
        # one answer per line: a changed answer is one changed line in a diff
        text = json.dumps(head, indent=1)[:-2] + ',\n "answers": {\n' + ",\n".join(lines) + "\n }\n}\n"
        path = folder / self.key.file_name
        aside = folder / f".{path.name}.tmp-{os.getpid()}"  # the stored file stays valid until the new one is complete
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                aside.write_text(text, encoding="utf-8")
                os.replace(aside, path)
            finally:
                aside.unlink(missing_ok=True)
        except OSError as error:
            raise InvalidArgument(f"the baseline cannot be stored in {folder}: {error.strerror}") from error
        return path


def load_baseline(folder: Path, key: BaselineKey) -> Baseline | None:
    """The stored baseline, or None. `InvalidArgument` if the file's content does not match its name."""
    path = folder / key.file_name
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stored = BaselineKey(*(content.get(field.name, "") for field in fields(BaselineKey)))
        version = content.get("format")
        answers = {name: answer_from_json(name, answer) for name, answer in content["answers"].items()}
        environment = {"machine": content["environment"]["machine"], **content["environment"]}
        int(environment["batch_size"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is damaged ({error!r}); recompute it with --refresh-baseline") from error
    if stored != key or version != FORMAT:
        raise InvalidArgument(
            f"{path} belongs to another checkpoint, suite or version; recompute it with --refresh-baseline"
        )
    return Baseline(key, environment, answers)


def replaceable_baseline(folder: Path, key: BaselineKey) -> Baseline | None:
    """Like `load_baseline`, but a refused file counts as absent, because it is about to be replaced."""
    try:
        return load_baseline(folder, key)
    except InvalidArgument:
        return None


def require_mergeable(
    older: Baseline | None, prompts: Sequence[PreparedPrompt], environment: Mapping[str, str]
) -> None:
    """Refuse to compute these prompts if the stored file's other answers would be lost.

    A file has the answers and times of one environment, so another environment's file can only be replaced as a whole.
    """
    if older is None or older.environment == environment:
        return
    lost = older.answers.keys() - {ids_digest(prompt) for prompt in prompts}
    if lost:
        raise InvalidArgument(
            f"the stored {older.key.dtype} baseline was computed elsewhere ({_words(older.environment)}; here "
            f"{_words(environment)}), and {len(lost)} of its answers are not among the {len(prompts)} requested "
            "samples, so they would be lost; use the full suite, without --num-samples, to compute all of them"
        )


def _words(environment: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def this_environment(batch_size: int) -> dict[str, str]:
    """The machine and versions of this process; imports torch."""
    return {"machine": machine_name(), "batch_size": str(batch_size), **hf.hf_versions()}


def missing_baseline(folder: Path, key: BaselineKey) -> Unsupported:
    """The error for answers that are not stored and cannot be computed here."""
    prefix = key.file_prefix
    stored = sorted(path.stem.removeprefix(prefix) for path in folder.glob(f"{prefix}*.json"))
    if key.dtype in stored:
        state = f"the stored {key.dtype} baseline lacks some of these samples (request fewer with --num-samples)"
    else:
        state = f"no {key.dtype} baseline of this checkpoint and suite is stored in {os.path.normpath(folder)}"
        state += f" (one is stored for {', '.join(stored)}: choose it with --dtype)" if stored else ""
    return Unsupported(f"{state}, and it cannot be computed: {hf.NO_TORCH}")


def answer_to_json(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids or ()),
        "num_prompt_tokens": answer.num_prompt_tokens,
        "seconds": round(answer.seconds, 4),
        "num_decisions": len(answer.decisions),
        "decisions": pack(answer.decisions),
        **({"rounding": [float(f"{value:.4g}") for value in answer.rounding]} if answer.rounding else {}),
    } | ({"num_tokens": answer.num_tokens, "choices": list(answer.log_likelihoods)} if answer.log_likelihoods else {})


def answer_from_json(name: str, content: Mapping[str, Any]) -> Answer:
    ids = tuple(int(token) for token in content["token_ids"])
    choices = tuple(float(value) for value in content.get("choices", ()))
    return Answer(
        text=str(content["text"]),
        num_prompt_tokens=int(content["num_prompt_tokens"]),
        num_tokens=int(content["num_tokens"]) if choices else len(ids),
        seconds=float(content["seconds"]),
        token_ids=None if choices else ids,
        decisions=unpack(str(content["decisions"]), int(content["num_decisions"])),
        rounding=tuple(float(value) for value in content.get("rounding", ())),
        prompt_digest=name,
        log_likelihoods=choices,
    )
