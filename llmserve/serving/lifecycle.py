"""Loads and unloads models: at start, when a client asks, and when files change."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from llmserve.errors import InternalError, InvalidArgument, ModelConfigError, Unavailable, raise_problems
from llmserve.owned_directory import OwnedDirectory, new_temporary_directory
from llmserve.serving.ensemble_plan import step_models
from llmserve.serving.loading.deployment import Deployment, Reasons
from llmserve.serving.loading.override import override_config, parse_config_json, write_override
from llmserve.serving.loading.repository import (
    Listing,
    ModelSource,
    list_models,
    open_repository,
    read_directory,
    read_model,
)
from llmserve.serving.loading.table import ModelStatus, ModelTable
from llmserve.serving.rollout.rollouts import Asked, Rollouts
from llmserve.serving.settings import ALL_MODELS, ControlMode, ServerSettings

logger = logging.getLogger(__name__)

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"  # Triton's message in other modes


class ModelLifecycle:
    def __init__(self, settings: ServerSettings, table: ModelTable, deployment: Deployment, rollouts: Rollouts) -> None:
        self._settings = settings
        self._repositories = [open_repository(location) for location in settings.model_repositories]
        self._table = table
        self._deployment = deployment
        self._rollouts = rollouts
        self._explicit: set[str] = set()  # asked for by name, not only as a step of an ensemble
        self._problems: set[str] = set()  # of the last poll
        self._override_ids = count()
        self._override_dir: OwnedDirectory | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Load the models that the control mode selects. Only an unusable repository raises."""
        listing = await self._list_models()
        listing.require_readable()
        if self._settings.control_mode == ControlMode.NONE:
            listing.require_models()
        self._check_overrides(listing)
        names = self._names_at_start(listing)
        self._explicit.update(names)
        await self._deploy(listing, names)
        self._deployment.logs_failures = True
        if self._settings.control_mode == ControlMode.POLL and self._settings.poll_s > 0:
            self._run(self._poll_forever())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._rollouts.close()
        await self._deployment.close()
        for repository in self._repositories:
            repository.close()
        if self._override_dir is not None:
            self._override_dir.remove()

    async def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """See `InferenceCore.load_model`. Continues if its caller is cancelled: nothing is left half loaded."""
        self._check_explicit()
        await asyncio.shield(self._run(self._load(name, config, files)))

    async def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        self._check_explicit()
        await asyncio.shield(self._run(self._unload(name, unload_dependents)))

    async def start_rollout(self, name: str, asked: Asked) -> None:
        """See `InferenceCore.start_rollout`. Continues if its caller is cancelled."""
        mode = self._settings.control_mode
        if mode == ControlMode.NONE:
            raise Unavailable("rollouts require --model-control-mode explicit or poll")
        if (asked.parameters or asked.adapter) and mode != ControlMode.EXPLICIT:
            what = "parameters of a candidate, such as its engine," if asked.parameters else "rollouts of an adapter"
            raise Unavailable(f"{what} need --model-control-mode explicit")
        await asyncio.shield(self._run(self._start_rollout(name, asked)))

    async def poll(self) -> None:
        """Load new and changed models, unload removed ones. An unreadable repository counts as unchanged."""
        listing = await self._list_models()
        problems = set(listing.unreadable.values())
        for problem in problems - self._problems:  # once, not at every poll
            logger.error("poll failed; the loaded models stay: %s", problem)
        self._problems = problems
        gone = [name for name in self._explicit.difference(listing.places) if self._has_gone(name, listing)]
        await self._deploy(listing, listing.places)
        for name in gone:
            await self._deployment.withdraw(name, has_gone=True)
        self._explicit = self._explicit.difference(gone).union(listing.places)
        names = {row.name for row in self.index()}
        for adapters in {model.adapters for model in self._table}:
            if adapters is not None:
                await asyncio.to_thread(adapters.poll, names)

    def index(self) -> list[ModelStatus]:
        """The status of every known version, and the models that nobody has asked for."""
        rows = self._table.statuses()
        known = {row.name for row in rows}
        places = list_models(self._repositories, cached=True).places
        rows += [ModelStatus(name, "", "") for name in places if name not in known]
        return sorted(rows, key=lambda row: row.name)  # stable: versions keep their order

    async def _list_models(self) -> Listing:
        return await asyncio.to_thread(list_models, self._repositories)

    def _check_explicit(self) -> None:
        if self._settings.control_mode != ControlMode.EXPLICIT:
            raise Unavailable(NOT_EXPLICIT)

    def _check_overrides(self, listing: Listing) -> None:
        known = ", ".join(listing.places)
        problems = [
            f"model '{name}' does not exist; models: {known}"
            for name in self._settings.parameter_overrides
            if name not in listing.places
        ]
        raise_problems(ModelConfigError, "parameter overrides have no effect", problems)

    def _names_at_start(self, listing: Listing) -> list[str]:
        wanted = self._settings.load_at_start
        if self._settings.control_mode != ControlMode.EXPLICIT or ALL_MODELS in wanted:
            return list(listing.places)
        missing = [f"model '{name}' does not exist" for name in wanted if name not in listing.places]
        raise_problems(ModelConfigError, "cannot load the models asked for", missing)
        return list(wanted)

    def _has_gone(self, name: str, listing: Listing) -> bool:
        source = self._deployment.source(name)
        return source is None or source.repository not in listing.unreadable

    async def _load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        try:
            listing = await self._list_models()
            listing.require_readable()
            source = await asyncio.to_thread(self._read, name, listing, config, files)
            if source.stamp and not source.versions:  # its files have been read
                raise InvalidArgument(
                    f"load failed for model '{name}': at least one version must be available under the version policy "
                    f"of model '{name}': {'; '.join(source.problems)}"
                )
            raise_problems(ModelConfigError, "it cannot be read", source.problems)
        except ModelConfigError as error:
            raise InternalError(f"failed to load '{name}', failed to poll from model repository: {error}") from None
        self._explicit.add(name)
        failures = await self._deploy(listing, [name], {name: source})
        if name in failures and name not in listing.places and self._deployment.source(name) is None:
            self._explicit.discard(name)
            self._deployment.forget(name)
        if failures:
            raise InvalidArgument("\n".join(_load_error(*failure) for failure in sorted(failures.items())))

    def _read(self, name: str, listing: Listing, config: str, files: Mapping[str, bytes]) -> ModelSource:
        if files and not config:
            raise InvalidArgument(
                f"failed to load '{name}': override files also require the model's config (parameter 'config')"
            )
        if name not in listing.places and not files:
            raise ModelConfigError(f"model '{name}' does not exist")
        override = parse_config_json(name, config) if config else None
        if files:
            source = self._read_sent(name, files)
        else:
            source = read_model(name, listing.places[name], self._settings.config_name)
        source = source if override is None else override_config(source, override)
        if source.problems and source.discard is not None:
            source.discard()
        return source

    def _read_sent(self, name: str, files: Mapping[str, bytes]) -> ModelSource:
        directory = self._new_override_dir()
        discard = partial(shutil.rmtree, directory, ignore_errors=True)
        try:
            source = read_directory(name, write_override(name, files, directory))
        except BaseException:
            discard()
            raise
        return replace(source, discard=discard)

    def _new_override_dir(self) -> Path:
        if self._override_dir is None:
            self._override_dir = new_temporary_directory("llmserve-models-")
        return Path(self._override_dir.path, str(next(self._override_ids)))

    async def _start_rollout(self, name: str, asked: Asked) -> None:
        self._table.find(name)
        if asked.adapter is not None:
            await self._rollouts.start_adapter(name, asked)
            return
        listing = await self._list_models()
        listing.require_readable()
        if name in listing.places:
            found = await asyncio.to_thread(read_model, name, listing.places[name], self._settings.config_name)
        else:  # a client has sent it
            served = self._deployment.source(name)
            assert served is not None
            found = served
        await self._rollouts.start(found, asked)

    async def _unload(self, name: str, unload_dependents: bool) -> None:
        steps = self._deployment.steps(name)
        self._explicit.discard(name)
        source = self._deployment.source(name)
        listing = await asyncio.to_thread(list_models, self._repositories, cached=True)
        only_sent = source is not None and source.repository is None and name not in listing.places
        await self._deployment.withdraw(name, has_gone=only_sent)
        if not unload_dependents:
            self._explicit.update(steps)  # they stay until they are unloaded by name
            return
        for step in steps:
            if step not in self._explicit and not self._deployment.users(step):
                await self._unload(step, unload_dependents)

    async def _deploy(
        self, listing: Listing, names: Iterable[str], read: Mapping[str, ModelSource] | None = None
    ) -> dict[str, Reasons]:
        """Load these models, and the steps of ensembles. `read`: sources that have been read already.

        A version that waits for a rollout is not loaded, unless it is in `read`: then a client has asked for it.
        """
        read = read or {}
        sources = await asyncio.to_thread(self._read_with_steps, listing, names, read)
        held = (source if source.name in read else self._rollouts.held(source) for source in sources)
        deployed = [source for source in held if source is not None]
        failures = await self._deployment.deploy(deployed, revive=bool(read))
        await self._rollouts.remember(deployed)
        if self._settings.control_mode == ControlMode.POLL:
            self._rollouts.offer(sources)
        return failures

    def _read_with_steps(
        self, listing: Listing, names: Iterable[str], read: Mapping[str, ModelSource]
    ) -> list[ModelSource]:
        sources = dict(read)
        waiting = list(names)
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name not in sources and name in listing.places:
                sources[name] = read_model(name, listing.places[name], self._settings.config_name)
            if name in sources:
                waiting += step_models(sources[name].config)
        return list(sources.values())

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            try:
                await self.poll()
            except Exception:  # border: the next poll may succeed
                logger.exception("poll failed; the loaded models stay")

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # raised where it is awaited; in any case it is in the log and the index


def _load_error(name: str, reasons: Reasons) -> str:
    states = "".join(
        f"version {version} is at UNAVAILABLE state: {reason};\n" if version else f"{reason};\n"
        for version, reason in reasons.items()
    )
    return f"load failed for model '{name}': {states}"
