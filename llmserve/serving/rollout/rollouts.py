"""The rollouts of a server: begins them, carries out what the rules decide, and remembers what came of them.

One at a time: two would divide the same requests. What was tried with a model last can be asked for until the server
stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unsupported
from llmserve.serving.config.labels import Labels
from llmserve.serving.config.model_config import is_ensemble, served_versions
from llmserve.serving.config.rollout_rules import Given, RolloutRules, given_rules, make_rules
from llmserve.serving.loading.deployment import Deployment
from llmserve.serving.loading.repository import ModelSource, Stamp
from llmserve.serving.loading.table import ModelTable
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.memory import Remembered, digest_of, read_memory, write_memory
from llmserve.serving.rollout.plans import make_splits
from llmserve.serving.rollout.progress import Decision, Verdict
from llmserve.serving.rollout.rollout import Candidate, Rollout, RolloutState
from llmserve.serving.rollout.routing import Split
from llmserve.serving.schedulers.shared import SharedResources

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client wants rolled out. Where it says nothing: the newest version, by the rules of the model's config."""

    version: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)  # of its config
    rules: Given = field(default_factory=dict)


class Rollouts:
    def __init__(self, table: ModelTable, deployment: Deployment, shared: SharedResources) -> None:
        self.splits: dict[str, Split] = {}  # by the names that lead to the model under rollout; read for every request
        self._table = table
        self._deployment = deployment
        self._shared = shared
        self._current: Rollout | None = None
        self._last: dict[str, Rollout] = {}  # by model
        self._refused: dict[str, str] = {}  # by model: the files that a candidate was rolled back with
        self._tried: dict[str, Stamp] = {}  # by model: all files that a poll has begun with; a new record may let it in
        self._files: dict[tuple[str, str], str] = {}  # (model, version) -> the version directory it was loaded from
        self._told: set[tuple[str, str]] = set()  # (model, problem): once is enough
        self._tasks: set[asyncio.Task[None]] = set()
        deployment.changed = self._replan

    def __iter__(self) -> Iterator[Rollout]:
        return iter([self._last[name] for name in sorted(self._last)])

    def find(self, name: str) -> Rollout:
        """The present rollout of a model, or its last one."""
        if name not in self._last:
            self._table.find(name)
            raise NotFound(f"model '{name}' has had no rollout since the server was started")
        return self._last[name]

    def candidates(self) -> list[ServedModel]:
        """Those that are loaded and not in the table."""
        current = self._current
        return [current.model] if current is not None and current.is_on and current.model is not None else []

    def labels(self, name: str, version: str) -> Labels | None:
        """Of a candidate that may have answered; None: it is none."""
        last = self._last.get(name)
        return last.labels if last is not None and last.candidate.version == version else None

    async def start(self, found: ModelSource, asked: Asked) -> None:
        """Returns when the candidate is beside the stable version. `found`: the model in its repository, as it is now.

        Raises `LlmserveError` when that cannot be; then nothing has changed.
        """
        name = found.name
        stable = self._table.find(name)
        self._check_model(stable)
        candidate = self._candidate(found, stable, asked)
        rollout = Rollout(name, candidate, _rules(candidate.source, asked), self._decided)
        self._current = self._last[name] = rollout
        try:
            model = await self._deployment.load_beside(candidate.source, candidate.version, candidate.files_version)
        except Exception as error:
            self._failed(rollout, f"the candidate cannot be loaded: {error}")
            raise
        try:
            self._begin(rollout, model)
        except LlmserveError as error:
            self._deployment.close_unused(model, candidate.source)
            self._failed(rollout, str(error))
            raise

    async def promote(self, name: str) -> None:
        """By hand, whatever the rules say."""
        rollout = self._active(name)
        if not rollout.is_on:
            raise InvalidArgument(f"the candidate of model '{name}' is still being loaded")
        rollout.is_promoting = True
        await self._promote(rollout, "by hand")

    def abort(self, name: str, reason: str = "") -> None:
        self._roll_back(self._active(name), reason or "by hand")

    def held(self, source: ModelSource) -> ModelSource | None:
        """What of a model may be loaded without a rollout; None: what is served is to be left as it is.

        Reads a file. Without rules in the model's config that is everything.
        """
        newest = _newest(source)
        if not _has_rules(source) or not newest:
            return source
        if served := self._table.versions(source.name):
            return None if newest > int(served[-1]) else source
        remembered = read_memory(source.path)
        self._refused.setdefault(source.name, remembered.refused)
        if remembered.stable not in source.versions or remembered.stable == newest:
            return source
        logger.warning(
            "model '%s': version %d was the stable one when the server ran last, and is served; version %d waits for "
            "a rollout", source.name, remembered.stable, newest,
        )  # fmt: skip
        kept = tuple(version for version in source.versions if version <= remembered.stable)
        return replace(source, versions=kept)

    def offer(self, sources: Sequence[ModelSource]) -> None:
        """Begin what a poll has found: a version that is newer than what is served, of a model with rules."""
        for source in sources:
            served = self._table.versions(source.name)
            if not served or not _has_rules(source) or _newest(source) <= int(served[-1]):
                continue
            current, digest = self._current, digest_of(source)
            if current is not None and current.is_active:
                if current.name == source.name and digest_of(current.candidate.source) != digest:
                    self._roll_back(current, "its files have changed; the next poll starts again")
                    del self._refused[source.name]
            elif digest != self._refused.get(source.name) and source.stamp != self._tried.get(source.name):
                self._tried[source.name] = source.stamp
                self._run(self._offered(source))

    async def remember(self, sources: Sequence[ModelSource]) -> None:
        """What is served now, of models with rules."""
        for source in sources:
            served = self._table.versions(source.name)
            if served and int(served[-1]) in source.versions:  # else it is made by parameters that are not there
                await self._write(source, int(served[-1]))

    async def close(self) -> None:
        """Before the deployment. What was on its way is not held against the candidate."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._current is not None and self._current.is_active:
            self._end(self._current, RolloutState.ROLLED_BACK, "the server stops")

    def _active(self, name: str) -> Rollout:
        rollout = self.find(name)
        if not rollout.is_active or rollout.is_promoting:
            end = rollout.state if not rollout.is_active else RolloutState.PROMOTED
            raise InvalidArgument(f"the rollout of model '{name}' has ended: {end}")
        return rollout

    def _check_model(self, stable: ServedModel) -> None:
        if self._current is not None and self._current.is_active:
            raise InvalidArgument(
                f"a rollout of model '{self._current.name}' is on its way; wait for its end, or abort it"
            )
        if is_ensemble(stable.config):
            raise Unsupported(f"'{stable.name}' is an ensemble; roll out the model of one of its steps")
        if stable.config.HasField("sequence_batching"):
            raise Unsupported(f"model '{stable.name}' keeps state between requests, which two versions cannot share")

    def _candidate(self, found: ModelSource, stable: ServedModel, asked: Asked) -> Candidate:
        name, served = found.name, self._deployment.source(found.name)
        if asked.parameters and not asked.version:
            source = served or found
            used = {*map(int, self._table.versions(name)), *found.versions}
            parameters = {**source.parameters, **asked.parameters}
            files = self._files.get((name, stable.version), stable.version)
            return Candidate(replace(source, parameters=parameters), str(max(used) + 1), files, asked.parameters)
        if not found.versions:
            raise InvalidArgument(f"model '{name}' has no versions: {'; '.join(found.problems)}")
        version = asked.version or str(found.versions[-1])
        known = ", ".join(map(str, found.versions))
        if version not in map(str, found.versions):
            raise NotFound(f"model '{name}' has no version {version} in its repository; versions: {known}")
        if version in self._table.versions(name):
            raise InvalidArgument(
                f"version {version} of model '{name}' is served already; there must be a version that is not "
                f"(there are {known}), or parameters that make one"
            )
        return Candidate(replace(found, parameters=asked.parameters), version, version, asked.parameters)

    def _begin(self, rollout: Rollout, model: ServedModel) -> None:
        if not rollout.is_active:
            raise InvalidArgument(f"the rollout of model '{rollout.name}' was aborted while its candidate was loaded")
        rollout.stable, rollout.model = self._table.find(rollout.name), model
        self.splits.update(self._planned(rollout))
        rollout.begin()

    def _planned(self, rollout: Rollout) -> dict[str, Split]:
        return make_splits(rollout, self._table, self._deployment.served_ensembles(), self._shared)

    def _failed(self, rollout: Rollout, reason: str) -> None:
        if rollout.is_active:
            rollout.end(RolloutState.FAILED, reason)

    def _replan(self) -> None:
        """Something else is served than before."""
        rollout = self._current
        if rollout is None or not rollout.is_on:
            return
        self.splits.clear()
        if rollout.is_promoting:
            return
        try:
            if self._table.find(rollout.name) is not rollout.stable:
                raise InvalidArgument(f"another version of model '{rollout.name}' was loaded meanwhile")
            self.splits.update(self._planned(rollout))
        except LlmserveError as error:
            self._end(rollout, RolloutState.ROLLED_BACK, str(error))

    def _decided(self, rollout: Rollout, decision: Decision) -> None:
        if decision.verdict is Verdict.ROLL_BACK:
            self._roll_back(rollout, decision.reason)
        else:
            rollout.is_promoting = True  # from now on nothing else is decided
            self._run(self._promote(rollout, decision.reason))

    async def _promote(self, rollout: Rollout, reason: str) -> None:
        candidate, model, stable = rollout.candidate, rollout.model, rollout.stable
        assert model is not None
        assert stable is not None
        wanted = set(map(str, served_versions(model.config, candidate.source.versions)))
        kept = {version for version in wanted if int(version) < int(candidate.version)}
        if candidate.version not in wanted:
            kept.discard(stable.version)
        try:
            await self._deployment.promote(candidate.source, model, over=stable, kept=kept)
        except InvalidArgument as error:
            self._end(rollout, RolloutState.ROLLED_BACK, str(error))
            raise
        rollout.end(RolloutState.PROMOTED, reason)
        self._files[rollout.name, candidate.version] = candidate.files_version
        source = candidate.source
        self._refused[rollout.name] = digest_of(source) if _newest(source) > int(candidate.version) else ""
        if not candidate.parameters:
            await self._write(source, int(candidate.version))

    def _roll_back(self, rollout: Rollout, reason: str) -> None:
        self._refused[rollout.name] = digest_of(rollout.candidate.source)
        self._end(rollout, RolloutState.ROLLED_BACK, reason, rescues=True)
        if rollout.stable_version and not rollout.candidate.parameters:
            self._run(self._write(rollout.candidate.source, int(rollout.stable_version)))

    def _end(self, rollout: Rollout, state: RolloutState, reason: str, *, rescues: bool = False) -> None:
        model = rollout.model
        self.splits.clear()
        rollout.end(state, reason, rescues=rescues)
        if model is not None:
            self._deployment.close_unused(model, rollout.candidate.source)

    async def _offered(self, source: ModelSource) -> None:
        version = str(_newest(source))
        try:
            await self.start(source, Asked(version))
        except LlmserveError as error:
            logger.error("version %s of model '%s' is not rolled out: %s", version, source.name, error)

    async def _write(self, source: ModelSource, stable: int) -> None:
        if not _has_rules(source):
            return
        remembered = Remembered(stable, self._refused.get(source.name, ""))
        problem = await asyncio.to_thread(write_memory, source, remembered)
        if problem and (source.name, problem) not in self._told:
            self._told.add((source.name, problem))
            logger.warning(
                "model '%s': that version %d is the stable one cannot be written down (%s), so a restart serves the "
                "newest", source.name, stable, problem,
            )  # fmt: skip

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, LlmserveError):  # those are among the decisions
            logger.error("a rollout went wrong", exc_info=error)


def _has_rules(source: ModelSource) -> bool:
    try:
        return given_rules(source.config) is not None
    except InvalidArgument:  # said when it is loaded
        return False


def _newest(source: ModelSource) -> int:
    """The version that its policy would have answer; 0: none."""
    return max(served_versions(source.config, source.versions), default=0)


def _rules(source: ModelSource, asked: Asked) -> RolloutRules:
    return make_rules({**(given_rules(source.config) or {}), **asked.rules})
