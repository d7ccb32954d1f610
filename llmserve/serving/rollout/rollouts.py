"""The rollouts of a server: begins them, carries out the decisions of the rules, and stores the results.

One at a time: two would split the same requests. The last rollout of each model can be queried until the server stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unsupported
from llmserve.serving.backend import Adapters
from llmserve.serving.config.labels import Labels
from llmserve.serving.config.model_config import is_ensemble, served_versions
from llmserve.serving.config.rollout_rules import Given, RolloutRules, given_rules, make_rules
from llmserve.serving.loading.deployment import Deployment
from llmserve.serving.loading.repository import ModelSource, Stamp
from llmserve.serving.loading.table import ModelTable
from llmserve.serving.model import ServedModel
from llmserve.serving.rollout.candidates import AdapterCandidate, VersionCandidate
from llmserve.serving.rollout.memory import Remembered, digest_of, read_memory, write_memory
from llmserve.serving.rollout.plans import make_splits
from llmserve.serving.rollout.progress import Decision, Verdict
from llmserve.serving.rollout.rollout import Rollout, RolloutState
from llmserve.serving.rollout.routing import Split
from llmserve.serving.schedulers.shared import SharedResources

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AskedAdapter:
    name: str  # of a loaded adapter
    path: Path  # of the candidate for this name


@dataclass(frozen=True, slots=True)
class Asked:
    """A rollout that a client asks for. By default: the newest version, with the rules of the model's config."""

    version: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)  # of its config
    rules: Given = field(default_factory=dict)
    adapter: AskedAdapter | None = None  # instead of a version


class Rollouts:
    def __init__(self, table: ModelTable, deployment: Deployment, shared: SharedResources) -> None:
        self.splits: dict[str, Split] = {}  # by the names that lead to the model under rollout; read for every request
        self._table = table
        self._deployment = deployment
        self._shared = shared
        self._current: Rollout | None = None
        self._last: dict[str, Rollout] = {}  # by model
        self._refused: dict[str, str] = {}  # by model: digest of the files of a candidate that was rolled back
        self._tried: dict[str, Stamp] = {}  # by model: files that a poll has tried; new sidecars permit a retry
        self._files: dict[tuple[str, str], str] = {}  # (model, version) -> the version directory it was loaded from
        self._told: set[tuple[str, str]] = set()  # (model, problem): those that were logged
        self._tasks: set[asyncio.Task[None]] = set()
        deployment.changed = self._replan

    def __iter__(self) -> Iterator[Rollout]:
        return iter([self._last[name] for name in sorted(self._last)])

    def find(self, name: str) -> Rollout:
        """The current rollout of a model, or its last one."""
        if name not in self._last:
            self._table.find(name)
            raise NotFound(f"model '{name}' has had no rollout since the server was started")
        return self._last[name]

    def candidates(self) -> list[ServedModel]:
        """The loaded candidates that are not in the table."""
        current = self._current
        if current is None or not current.is_on or current.model is None or current.model is current.stable:
            return []
        return [current.model]

    def labels(self, name: str, version: str) -> Labels | None:
        """The labels of a candidate that may have answered; None: the version is not a candidate."""
        last = self._last.get(name)
        if last is None or last.candidate.adapter is not None or last.candidate.version != version:
            return None
        return last.labels

    async def start(self, found: ModelSource, asked: Asked) -> None:
        """Start a rollout; returns when the candidate is loaded. `found`: the model in its repository, as it is now.

        Raises `LlmserveError` if that fails; then nothing has changed.
        """
        stable = self._table.find(found.name)
        self._check_model(stable)
        candidate = self._candidate(found, stable, asked)
        await self._open(Rollout(found.name, candidate, _rules(candidate.source.config, asked), self._decided))

    async def start_adapter(self, name: str, asked: Asked) -> None:
        """Start a rollout of an adapter for the name of a loaded one."""
        stable, adapter = self._table.find(name), asked.adapter
        assert adapter is not None
        self._check_model(stable)
        if asked.version or asked.parameters:
            raise InvalidArgument("a rollout of an adapter does not change the model: leave out version and parameters")
        if stable.adapters is None:
            raise Unsupported(f"model '{name}' does not support adapters")
        candidate = AdapterCandidate(stable, stable.adapters, adapter.name, adapter.path)
        await self._open(Rollout(name, candidate, _rules(stable.config, asked), self._decided))

    async def _open(self, rollout: Rollout) -> None:
        candidate = rollout.candidate
        self._current = self._last[rollout.name] = rollout
        try:
            model = await candidate.open()
        except Exception as error:
            self._failed(rollout, f"the candidate cannot be loaded: {error}")
            raise
        try:
            await asyncio.to_thread(_require_same_ids, self._table.find(rollout.name), model)
            self._begin(rollout, model)
        except (LlmserveError, asyncio.CancelledError) as error:
            candidate.close(model)
            self._failed(rollout, str(error))
            raise

    async def promote(self, name: str) -> None:
        """Promote by hand, regardless of the rules."""
        rollout = self._active(name)
        if not rollout.is_on:
            raise InvalidArgument(f"the candidate of model '{name}' is still being loaded")
        rollout.is_promoting = True
        await self._promote(rollout, "by hand")

    def abort(self, name: str, reason: str = "") -> None:
        self._roll_back(self._active(name), reason or "by hand")

    def adapter_changed(self, adapters: Adapters, name: str) -> None:
        """The adapter of a name was replaced or unloaded: end its rollout."""
        rollout = self._current
        if rollout is None or not rollout.is_active or rollout.is_promoting:
            return
        candidate = rollout.candidate
        if isinstance(candidate, AdapterCandidate) and (candidate.adapters, candidate.name) == (adapters, name):
            self._end(rollout, RolloutState.ROLLED_BACK, f"adapter '{name}' was reloaded or unloaded in the meantime")

    def held(self, source: ModelSource) -> ModelSource | None:
        """The part of a source that may be loaded without a rollout; None: leave the served versions as they are.

        Without rules in the model's config, that is the whole source. Reads a file.
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
            "model '%s': version %d was the stable one before the restart and is served; version %d waits for "
            "a rollout", source.name, remembered.stable, newest,
        )  # fmt: skip
        kept = tuple(version for version in source.versions if version <= remembered.stable)
        return replace(source, versions=kept)

    def offer(self, sources: Sequence[ModelSource]) -> None:
        """Begin rollouts that a poll has found: versions newer than the served ones, of models with rules."""
        for source in sources:
            served = self._table.versions(source.name)
            if not served or not _has_rules(source) or _newest(source) <= int(served[-1]):
                continue
            current, digest = self._current, digest_of(source)
            if current is not None and current.is_active:
                tried = current.candidate.source if isinstance(current.candidate, VersionCandidate) else None
                if tried is not None and tried.name == source.name and digest_of(tried) != digest:
                    self._roll_back(current, "its files have changed; the next poll starts again")
                    del self._refused[source.name]
            elif digest != self._refused.get(source.name) and source.stamp != self._tried.get(source.name):
                self._tried[source.name] = source.stamp
                self._run(self._offered(source))

    async def remember(self, sources: Sequence[ModelSource]) -> None:
        """Store the versions that are served now, for models with rules."""
        for source in sources:
            served = self._table.versions(source.name)
            if served and int(served[-1]) in source.versions:  # else it comes from parameters that are not stored
                await self._write(source, int(served[-1]))

    async def close(self) -> None:
        """Call it before closing the deployment. A running rollout does not count against the candidate."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._current is not None and self._current.is_active:
            self._end(self._current, RolloutState.ROLLED_BACK, "the server is stopping")

    def _active(self, name: str) -> Rollout:
        rollout = self.find(name)
        if not rollout.is_active or rollout.is_promoting:
            end = rollout.state if not rollout.is_active else RolloutState.PROMOTED
            raise InvalidArgument(f"the rollout of model '{name}' has ended: {end}")
        return rollout

    def _check_model(self, stable: ServedModel) -> None:
        if self._current is not None and self._current.is_active:
            raise InvalidArgument(
                f"a rollout of model '{self._current.name}' is in progress; wait until it ends, or abort it"
            )
        if is_ensemble(stable.config):
            raise Unsupported(f"'{stable.name}' is an ensemble; roll out the model of one of its steps")
        if stable.config.HasField("sequence_batching"):
            raise Unsupported(f"model '{stable.name}' keeps state between requests, which two versions cannot share")

    def _candidate(self, found: ModelSource, stable: ServedModel, asked: Asked) -> VersionCandidate:
        name, served = found.name, self._deployment.source(found.name)
        if asked.parameters and not asked.version:
            source = served or found
            used = {*map(int, self._table.versions(name)), *found.versions}
            parameters = {**source.parameters, **asked.parameters}
            files = self._files.get((name, stable.version), stable.version)
            source = replace(source, parameters=parameters)
            return VersionCandidate(source, str(max(used) + 1), files, asked.parameters, self._deployment)
        if not found.versions:
            raise InvalidArgument(f"model '{name}' has no versions: {'; '.join(found.problems)}")
        version = asked.version or str(found.versions[-1])
        known = ", ".join(map(str, found.versions))
        if version not in map(str, found.versions):
            raise NotFound(f"model '{name}' has no version {version} in its repository; versions: {known}")
        if version in self._table.versions(name):
            raise InvalidArgument(
                f"version {version} of model '{name}' is already served; add a version that is not "
                f"(there are {known}), or parameters that make one"
            )
        source = replace(found, parameters=asked.parameters)
        return VersionCandidate(source, version, version, asked.parameters, self._deployment)

    def _begin(self, rollout: Rollout, model: ServedModel) -> None:
        if not rollout.is_active:
            reason = rollout.decisions[-1].reason
            raise InvalidArgument(
                f"the rollout of model '{rollout.name}' ended while its candidate was loading: {reason}"
            )
        rollout.stable, rollout.model = self._table.find(rollout.name), model
        if rollout.candidate.adapter is not None and model is not rollout.stable:
            raise InvalidArgument(f"model '{rollout.name}' was reloaded in the meantime, with its adapters")
        self.splits.update(self._planned(rollout))
        rollout.begin()

    def _planned(self, rollout: Rollout) -> dict[str, Split]:
        return make_splits(rollout, self._table, self._deployment.served_ensembles(), self._shared)

    def _failed(self, rollout: Rollout, reason: str) -> None:
        if rollout.is_active:
            rollout.end(RolloutState.FAILED, reason)

    def _replan(self) -> None:
        """The served models have changed: plan again."""
        rollout = self._current
        if rollout is None or not rollout.is_on:
            return
        self.splits.clear()
        if rollout.is_promoting:
            return
        try:
            if self._table.find(rollout.name) is not rollout.stable:
                raise InvalidArgument(f"another version of model '{rollout.name}' was loaded in the meantime")
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
        try:
            await candidate.promote(model, over=stable)
        except InvalidArgument as error:
            self._end(rollout, RolloutState.ROLLED_BACK, str(error))
            raise
        self.splits.clear()
        rollout.end(RolloutState.PROMOTED, reason)
        if not isinstance(candidate, VersionCandidate):
            return
        self._files[rollout.name, candidate.version] = candidate.files_version
        source = candidate.source
        self._refused[rollout.name] = digest_of(source) if _newest(source) > int(candidate.version) else ""
        if not candidate.parameters:
            await self._write(source, int(candidate.version))

    def _roll_back(self, rollout: Rollout, reason: str) -> None:
        candidate = rollout.candidate
        self._end(rollout, RolloutState.ROLLED_BACK, reason, rescues=True)
        if not isinstance(candidate, VersionCandidate):
            return
        self._refused[rollout.name] = digest_of(candidate.source)
        if rollout.stable_version and not candidate.parameters:
            self._run(self._write(candidate.source, int(rollout.stable_version)))

    def _end(self, rollout: Rollout, state: RolloutState, reason: str, *, rescues: bool = False) -> None:
        model = rollout.model
        self.splits.clear()
        rollout.end(state, reason, rescues=rescues)
        if model is not None:
            rollout.candidate.close(model)

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
                "model '%s': that version %d is the stable one cannot be stored (%s), so a restart serves the "
                "newest", source.name, stable, problem,
            )  # fmt: skip

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, LlmserveError):  # those are in the decisions
            logger.error("a rollout failed", exc_info=error)


def _require_same_ids(stable: ServedModel, candidate: ServedModel) -> None:
    """Raises `InvalidArgument` if token ids have another meaning: other steps and clients create and read them."""
    if candidate is stable:
        return
    known, own = stable.id_digests(), candidate.id_digests()
    if differing := sorted(name for name in known.keys() & own.keys() if known[name] != own[name]):
        raise InvalidArgument(
            f"the candidate's {' and '.join(differing)} has different tokens from version {stable.version}, and "
            "the pipeline keeps its tokenizer: serve an engine with another one as a separate model"
        )


def _has_rules(source: ModelSource) -> bool:
    try:
        return given_rules(source.config) is not None
    except InvalidArgument:  # reported when it is loaded
        return False


def _newest(source: ModelSource) -> int:
    """The version that answers by its version policy; 0: none."""
    return max(served_versions(source.config, source.versions), default=0)


def _rules(config: ModelConfig, asked: Asked) -> RolloutRules:
    return make_rules({**(given_rules(config) or {}), **asked.rules})
