"""Adds models to the table and removes them, without disturbing requests.

It runs on the event loop, with blocking work in threads. A model is loaded next to the one that it replaces: requests
go to the old one until the new one is ready, and the old one is unloaded when its last request has ended. Either all
versions of a model are loaded or none; a failed load does not change what is served. An ensemble refers to the loaded
models of its steps: when one of them is replaced, the ensemble is planned again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from llmserve.errors import InvalidArgument, LlmserveError, ModelConfigError
from llmserve.serving.backend import Backend
from llmserve.serving.config.model_config import is_ensemble
from llmserve.serving.ensemble_plan import step_models
from llmserve.serving.loading.loader import PreparedModel, ServerContext, load_version, prepare, serve_ensemble
from llmserve.serving.loading.repository import ModelSource, read_again
from llmserve.serving.loading.table import ModelTable
from llmserve.serving.model import ServedModel
from llmserve.serving.settings import ServerSettings
from llmserve.serving.threads import in_daemon_thread

logger = logging.getLogger(__name__)

NUM_ATTEMPTS = 3  # to load a model whose files change meanwhile

Reasons: TypeAlias = dict[str, str]  # version, or "" for the whole model -> why it was not loaded


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load or unload at a time
    source: ModelSource | None = None  # of the served versions
    ensemble: PreparedModel | None = None  # served whenever its steps are
    reasons: Reasons = field(default_factory=dict)  # of the last load, if it failed
    has_gone: bool = False  # its files were removed
    num_users: int = 0  # tasks that hold the lock or wait for it


@dataclass(slots=True)
class _Round:
    """The changes made so far by one call of `deploy`, `promote` or `withdraw`."""

    revives: bool = False
    changed: set[str] = field(default_factory=set)
    candidates: dict[str, PreparedModel] = field(default_factory=dict)  # ensembles to plan
    failures: dict[str, Reasons] = field(default_factory=dict)
    replaced: list[tuple[str, Sequence[ServedModel], ModelSource | None]] = field(default_factory=list)
    failed: list[ModelSource] = field(default_factory=list)


class _LoadFailed(Exception):
    def __init__(self, reasons: Reasons) -> None:
        super().__init__()
        self.reasons = reasons


class Deployment:
    def __init__(
        self, table: ModelTable, settings: ServerSettings, backends: Mapping[str, Backend], server: ServerContext
    ) -> None:
        self._table = table
        self._settings = settings
        self._backends = backends
        self._server = server
        self._entries: dict[str, _Entry] = {}
        self._slots = asyncio.Semaphore(settings.load_threads)
        self._retiring: set[ServedModel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.logs_failures = False  # not at the start, when the table of models shows them
        self.changed: Callable[[], None] = lambda: None  # called when the served models change

    def source(self, name: str) -> ModelSource | None:
        """The source of a model that is served, or will be when its steps are."""
        entry = self._entries.get(name)
        return entry.source if entry is not None else None

    def steps(self, name: str) -> list[str]:
        """The models of an ensemble; empty for any other model."""
        entry = self._entries.get(name)
        return step_models(entry.ensemble.config) if entry is not None and entry.ensemble is not None else []

    def users(self, name: str) -> list[str]:
        """The ensembles that have `name` as a step."""
        return [user for user in self._entries if name in self.steps(user)]

    async def deploy(self, sources: Sequence[ModelSource], *, revive: bool = False) -> dict[str, Reasons]:
        """Load sources whose current state is not served; returns why models could not be loaded.

        `revive`: also reload models that have stopped working, even if their files have not changed.
        """
        work = _Round(revive)
        try:
            await asyncio.gather(*(self._deploy(source, work) for source in sources))
        finally:
            self._plan_ensembles(work)
            self._retire_replaced(work)
            await asyncio.gather(*map(self._discard_failed, work.failed))
        return work.failures

    def forget(self, name: str) -> None:
        """Forget a model that is neither served nor in a repository."""
        entry = self._entries.get(name)
        if entry is not None and not entry.num_users and entry.source is None:
            del self._entries[name]
            self._table.forget(name)

    async def withdraw(self, name: str, *, has_gone: bool = False) -> None:
        """Stop serving a model. Its requests run to their end, and it is unloaded after the last one.

        `has_gone`: its files were removed, so it is forgotten afterwards.
        """
        entry = self._entries.get(name)
        if entry is None:
            return
        async with _used(entry):
            versions = self._table.versions(name) or [version for version in entry.reasons if version]
            source, entry.source, entry.ensemble, entry.reasons = entry.source, None, None, {}
            entry.has_gone = has_gone
            work = _Round(changed={name}, replaced=[(name, self._table.serve(name, ()), source)])
            self._table.set_unloaded(name, versions)
            self._plan_ensembles(work)
            self._retire_replaced(work)

    async def load_beside(self, source: ModelSource, version: str, files_version: str) -> ServedModel:
        """Load a version next to the served ones, without serving it. Raises `LlmserveError`. See `close_unused`.

        `version`: its number; `files_version`: the version that has its files.
        """
        work = partial(prepare, source, self._backends, self._settings)
        async with self._slots:
            prepared = await in_daemon_thread(work, f"prepare-{source.name}")
            backend = self._backends[prepared.config.backend]
            reserved = sum(model.promised_bytes for model in (*self._table, *self._retiring))
            return await load_version(
                prepared, version, backend, self._server, files_version=files_version, reserved_bytes=reserved
            )

    async def promote(
        self, source: ModelSource, model: ServedModel, *, over: ServedModel, kept: Collection[str]
    ) -> None:
        """Serve a version that `load_beside` has loaded. Of the served versions, only those in `kept` stay.

        Raises `InvalidArgument` if `over` does not answer now: another version was loaded meanwhile.
        """
        async with _used(self._entries.setdefault(source.name, _Entry())):
            if not self._table.is_served(source.name) or self._table.find(source.name) is not over:
                raise InvalidArgument(f"another version of model '{source.name}' was loaded since, or none is")
            work = _Round(changed={source.name})
            others = [one for one in self._table if one.name == source.name and one.version in kept]
            self._serve(source, [*others, model], work)
            work.replaced = [
                (name, [one for one in models if one not in others], unused) for name, models, unused in work.replaced
            ]
            self._plan_ensembles(work)
            self._retire_replaced(work)

    def close_unused(self, model: ServedModel, source: ModelSource) -> None:
        """Unload a version that is not served, after its last request."""
        self._retiring.add(model)
        self._spawn(self._close_unused(model, source))

    async def _close_unused(self, model: ServedModel, source: ModelSource) -> None:
        await self._unload(model.name, [model], None)
        await self._discard_failed(source)

    def served_ensembles(self) -> dict[str, PreparedModel]:
        served = ((name, entry.ensemble) for name, entry in self._entries.items() if self._table.is_served(name))
        return {name: ensemble for name, ensemble in served if ensemble is not None}

    async def close(self) -> None:
        """Unload all models at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(_close(model) for model in (*self._table, *self._retiring)))
        self._retiring.clear()
        self._table.clear()

    def _retire_replaced(self, work: _Round) -> None:
        """Retire replaced models. Call it after planning all ensembles: until then some use them."""
        self.changed()
        for replaced in work.replaced:
            self._retire(*replaced)

    async def _deploy(self, source: ModelSource, work: _Round) -> None:
        entry = self._entries.setdefault(source.name, _Entry())
        async with _used(entry):
            if self._is_current(entry, source) and not (work.revives and self._has_died(source.name)):
                return
            entry.has_gone = False
            for attempt in range(1, NUM_ATTEMPTS + 1):
                try:
                    await self._attempt(source, work)
                except _LoadFailed as failure:
                    newer = await asyncio.to_thread(read_again, source, self._settings.config_name)
                    if newer is None or attempt == NUM_ATTEMPTS:
                        self._fail(source.name, failure.reasons, work)
                        work.failed.append(source)
                        return
                    source = newer  # its files are still being written
                else:
                    return

    async def _attempt(self, source: ModelSource, work: _Round) -> None:
        self._table.set_loading(source.name, [""])
        prepared = await self._prepare(source)
        self._table.set_loading(source.name, prepared.versions)
        if is_ensemble(prepared.config):
            work.candidates[source.name] = prepared
            return
        self._serve(source, await self._load(prepared), work)
        work.changed.add(source.name)

    def _is_current(self, entry: _Entry, source: ModelSource) -> bool:
        now = entry.source
        if now is None or entry.reasons or source.is_override or not self._table.is_served(source.name):
            return False
        return (now.path, now.served_stamp, now.versions) == (source.path, source.served_stamp, source.versions)

    def _has_died(self, name: str) -> bool:
        return not all(model.healthy() for model in self._table if model.name == name)

    async def _prepare(self, source: ModelSource) -> PreparedModel:
        async with self._slots:
            try:
                work = partial(prepare, source, self._backends, self._settings)
                return await in_daemon_thread(work, f"prepare-{source.name}")
            except Exception as error:  # border: a failure becomes the model's status
                raise _LoadFailed({"": _reason(error)}) from error

    async def _load(self, prepared: PreparedModel) -> list[ServedModel]:
        loads = (self._load_version(prepared, version) for version in prepared.versions)
        outcomes = await asyncio.gather(*loads, return_exceptions=True)
        models = [outcome for outcome in outcomes if isinstance(outcome, ServedModel)]
        reasons = {
            version: _reason(outcome)
            for version, outcome in zip(prepared.versions, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        if reasons:
            await asyncio.gather(*map(_close, models))
            raise _LoadFailed(reasons)
        return models

    async def _load_version(self, prepared: PreparedModel, version: str) -> ServedModel:
        backend = self._backends[prepared.config.backend]
        async with self._slots:
            return await load_version(prepared, version, backend, self._server)

    def _serve(
        self,
        source: ModelSource,
        models: Sequence[ServedModel],
        work: _Round,
        *,
        ensemble: PreparedModel | None = None,
    ) -> None:
        entry = self._entries[source.name]
        before, entry.source, entry.ensemble, entry.reasons = entry.source, source, ensemble, {}
        unused = None if before is None or before.path == source.path else before
        work.replaced.append((source.name, self._table.serve(source.name, models), unused))

    def _fail(self, name: str, reasons: Reasons, work: _Round) -> None:
        work.failures[name] = reasons
        entry = self._entries[name]
        if self.logs_failures and entry.reasons != reasons:  # a repeated failure is logged once
            logger.error("model %r was not loaded: %s", name, "; ".join(reasons.values()))
        entry.reasons = reasons
        self._table.set_failed(name, reasons)

    def _retire(self, name: str, models: Sequence[ServedModel], source: ModelSource | None) -> None:
        """`source`: the source of these models, if nothing else uses it any more."""
        for model in models:
            self._table.set_unloading(name, model.version)
        self._retiring.update(models)
        self._spawn(self._unload(name, models, source))

    async def _unload(self, name: str, models: Sequence[ServedModel], source: ModelSource | None) -> None:
        for model in models:
            await model.unused()
            await _close(model)
            self._retiring.discard(model)
            self._table.set_unloaded(name, [model.version], only_unloading=True)
        entry = self._entries.get(name)
        if entry is not None and entry.has_gone:
            self.forget(name)
        if source is not None:
            await _discard(source)

    async def _discard_failed(self, source: ModelSource) -> None:
        """Discard the source's files, unless the model is served from them or may be later."""
        entry = self._entries.get(source.name, _Entry())
        kept = (entry.source, entry.ensemble.source if entry.ensemble is not None else None)
        if all(other is None or other.path != source.path for other in kept):
            await _discard(source)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _plan_ensembles(self, work: _Round) -> None:
        """Plan ensembles that are new or whose steps have changed; inner ones before those that use them."""
        waiting = self._affected(work)
        while waiting:
            due = [name for name in waiting if waiting.isdisjoint(self._all_steps(name, work))]
            for name in sorted(due or waiting):
                waiting.remove(name)
                self._plan_ensemble(name, work, cyclic=not due)

    def _affected(self, work: _Round) -> set[str]:
        ensembles = {name for name, entry in self._entries.items() if entry.ensemble is not None} | set(work.candidates)
        affected = set(work.candidates)
        grown = True
        while grown:
            changed = affected | work.changed
            more = {name for name in ensembles - affected if not changed.isdisjoint(self._all_steps(name, work))}
            grown = bool(more)
            affected |= more
        return affected

    def _all_steps(self, name: str, work: _Round) -> Collection[str]:
        candidate = work.candidates.get(name)
        return {*self.steps(name), *(step_models(candidate.config) if candidate is not None else ())}

    def _plan_ensemble(self, name: str, work: _Round, *, cyclic: bool) -> None:
        """Serve the new plan; if that fails, the old plan on the current models; if that fails, too, none."""
        entry = self._entries[name]
        candidate = work.candidates.get(name)
        reasons: Reasons = {}
        for prepared in filter(None, (candidate, entry.ensemble)):
            try:
                if cyclic and prepared is candidate:
                    raise ModelConfigError(f"ensemble '{name}' contains itself through its steps")
                models = [
                    serve_ensemble(prepared, version, self._table.find, self._server.shared)
                    for version in prepared.versions
                ]
            except LlmserveError as error:
                reasons = reasons or dict.fromkeys(prepared.versions, str(error))
                if prepared is candidate:
                    work.failed.append(prepared.source)
            else:
                self._serve(prepared.source, models, work, ensemble=prepared)
                break
        else:
            if candidate is not None and not candidate.source.is_override:  # it may be served when its steps are
                entry.ensemble = candidate
            if entry.source is None or is_ensemble(
                entry.source.config
            ):  # else the model that it should replace stays served
                work.replaced.append((name, self._table.serve(name, ()), None))
        if reasons and any(map(self._table.is_unloaded, self.steps(name))):
            self._table.set_unloaded(name, list(reasons))
        elif reasons:
            self._fail(name, reasons, work)


@asynccontextmanager
async def _used(entry: _Entry) -> AsyncIterator[None]:
    """Lock an entry. An entry that is used or waited for is not forgotten."""
    entry.num_users += 1
    try:
        async with entry.lock:
            yield
    finally:
        entry.num_users -= 1


async def _discard(source: ModelSource) -> None:
    if source.discard is not None:
        await asyncio.to_thread(source.discard)


def _reason(error: BaseException) -> str:
    if isinstance(error, LlmserveError):
        return str(error)
    logger.error("%s", error, exc_info=error)
    return f"{type(error).__name__}: {error}"


async def _close(model: ServedModel) -> None:
    try:
        await model.close()
    except Exception:  # border: the others must still be unloaded
        logger.exception("model '%s' could not be unloaded", model.name)
