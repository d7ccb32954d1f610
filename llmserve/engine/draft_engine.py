"""An engine that drafts tokens for another one (`scheduler/drafts/model.py`): a smaller network, or the larger
network's own layer for drafts. Checks its compatibility and runs its steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from llmserve.engine.base import Runner, RunnerInfo
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.vocabulary import tokenizer_digests
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.scheduler.drafts.model import DraftModel, Drawn
from llmserve.scheduler.drafts.token_ids import TokenIds
from llmserve.scheduler.plan import StepPlan
from llmserve.scheduler.settings import SchedulerSettings

logger = logging.getLogger(__name__)


class DraftEngine:
    """Owns `runner`, and closes it. If it fails, drafting stops; answers do not depend on it."""

    def __init__(self, runner: Runner, beside: RunnerInfo, vocabulary: NDArray[np.int32] | None = None) -> None:
        """`beside`: the engine that it drafts for. `vocabulary`: see `EngineDirectory.draft_vocabulary`."""
        self._runner = runner
        self._has_failed = False
        cost = runner.info.weight_bytes / max(1, beside.weight_bytes)  # a step of few rows mostly reads weights
        if runner.info.row_times and beside.row_times:
            cost = runner.info.row_times[0][1] / beside.row_times[0][1]
        token_ids = TokenIds(runner.info.vocab_size, beside.vocab_size, vocabulary)
        self.model = DraftModel(
            runner.info.scheduler_config(SchedulerSettings()), self._step, token_ids, prior_cost=cost,
            reads_hidden=runner.info.hidden_width > 0,
        )  # fmt: skip

    @property
    def promised_bytes(self) -> int:
        """See `EngineStats`."""
        info, model = self._runner.info, self.model
        return info.promised_bytes(model.pool.num_free, model.states.num_free)

    def close(self) -> None:
        self._runner.close()

    def _step(self, plan: StepPlan) -> Drawn | None:
        if self._has_failed:
            return None
        try:
            result = self._runner.step(plan)
            return Drawn(result.tokens, result.log_probs, result.hidden)
        except Exception:  # the border: answers continue without drafts after any failure
            logger.exception("the draft engine failed; speculative decoding with it is off")
            self._has_failed = True
            return None


def check_draft_engine(draft: EngineDirectory, directory: EngineDirectory) -> None:
    """Raises `InvalidArgument` listing everything that prevents `draft` from drafting for `directory`."""
    raise_problems(
        InvalidArgument, f"{draft.path} cannot draft for {directory.path}", list(_problems(draft, directory))
    )


def _problems(draft: EngineDirectory, directory: EngineDirectory) -> Iterator[str]:
    if draft.info().pooling:
        yield "it does not generate tokens"
    if width := draft.hidden_width:
        wanted = draft.info().architecture, width
        found = directory.info().architecture, directory.config["pretrained_config"].get("hidden_size")
        if directory.hidden_width or wanted != found:
            yield (
                f"it is the layer for drafts of a {wanted[0]} with rows of {wanted[1]} numbers, but the engine is a "
                f"{found[0]} with rows of {found[1]}"
            )
    sizes = draft.info().vocab_size, directory.info().vocab_size
    theirs, ours = tokenizer_digests(draft), tokenizer_digests(directory)
    names = theirs.keys() & ours.keys()
    differing = sorted(name for name in names if theirs[name] != ours[name])
    if sizes[0] != sizes[1] and (differing or not names):  # with the same tokenizer, one of them has more padding
        yield f"its vocabulary has {sizes[0]} tokens, the engine's has {sizes[1]}"
    if not names and (theirs or ours):
        yield f"its tokenizer is in {_listed(theirs)}, the engine's is in {_listed(ours)}"
    for name in differing:
        yield f"its tokenizer is different: its {name} has the digest {theirs[name]}, the engine's {ours[name]}"


def _listed(digests: dict[str, str]) -> str:
    return " and ".join(f"{name} (digest {digest})" for name, digest in digests.items()) or "no file"
