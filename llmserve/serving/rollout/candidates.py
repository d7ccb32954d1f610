"""Candidates of rollouts: another version of a model, or another adapter for one of its names.

An adapter needs no second model: both adapters use the same engine, and only requests for the name are watched, copied
and split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from llmserve.errors import InvalidArgument
from llmserve.serving.backend import Adapters
from llmserve.serving.config.model_config import served_versions
from llmserve.serving.loading.deployment import Deployment
from llmserve.serving.loading.repository import ModelSource
from llmserve.serving.model import ServedModel
from llmserve.serving.types import InferRequest


class Candidate(Protocol):
    @property
    def version(self) -> str:
        """The version in its answers."""
        ...

    @property
    def parameters(self) -> Mapping[str, str]:
        """Parameters of its config that replace those in the repository."""
        ...

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """Facts about the candidate if it is an adapter; else None."""
        ...

    def watches(self, request: InferRequest) -> bool:
        """Whether the rollout applies to a request."""
        ...

    def asked(self, request: InferRequest) -> InferRequest:
        """The same request, for the candidate."""
        ...

    def beside(self, stable: ServedModel) -> str:
        """A description of the version or adapter that it is compared with."""
        ...

    async def open(self) -> ServedModel:
        """Load it; returns the model that answers with it. Raises the errors of loading."""
        ...

    async def promote(self, model: ServedModel, *, over: ServedModel) -> None:
        """Raises `InvalidArgument` if another one was loaded meanwhile."""
        ...

    def close(self, model: ServedModel) -> None:
        """Unload it after its last request. `model`: the result of `open`."""
        ...


@dataclass(frozen=True, slots=True)
class VersionCandidate:
    source: ModelSource
    version: str  # its number
    files_version: str  # the version directory with its files
    parameters: Mapping[str, str]
    deployment: Deployment
    adapter: None = None

    def __str__(self) -> str:
        more = ", ".join(f"{key} = {value}" for key, value in self.parameters.items())
        return f"version {self.version}" + (f" ({more})" if more else "")

    def watches(self, request: InferRequest) -> bool:
        return True

    def asked(self, request: InferRequest) -> InferRequest:
        return request

    def beside(self, stable: ServedModel) -> str:
        return f"version {stable.version}"

    async def open(self) -> ServedModel:
        return await self.deployment.load_beside(self.source, self.version, self.files_version)

    async def promote(self, model: ServedModel, *, over: ServedModel) -> None:
        wanted = set(map(str, served_versions(model.config, self.source.versions)))
        kept = {version for version in wanted if int(version) < int(self.version)}
        if self.version not in wanted:
            kept.discard(over.version)
        await self.deployment.promote(self.source, model, over=over, kept=kept)

    def close(self, model: ServedModel) -> None:
        self.deployment.close_unused(model, self.source)


@dataclass(slots=True)
class AdapterCandidate:
    """An adapter as a candidate. `model` has the adapter that answers under `name` now."""

    model: ServedModel
    adapters: Adapters
    name: str
    path: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    stable_digest: str = ""  # set by `open`, as is `digest`
    digest: str = ""

    def __str__(self) -> str:
        return f"adapter '{self.name}' ({self.path})"

    @property
    def version(self) -> str:
        return self.model.version

    @property
    def adapter(self) -> Mapping[str, Any]:
        return {"name": self.name, "path": str(self.path), "stable_digest": self.stable_digest,
                "candidate_digest": self.digest}  # fmt: skip

    def watches(self, request: InferRequest) -> bool:
        try:
            return request.asked_adapter == self.name
        except InvalidArgument:  # the model reports it
            return False

    def asked(self, request: InferRequest) -> InferRequest:
        return replace(request, wants_candidate=True)

    def beside(self, stable: ServedModel) -> str:
        return f"the adapter with digest {self.stable_digest[:12]}"

    async def open(self) -> ServedModel:
        self.digest = await asyncio.to_thread(self.adapters.load_candidate, self.name, self.path)
        self.stable_digest = self.adapters.facts().get(self.name, {}).get("digest", "")
        return self.model

    async def promote(self, model: ServedModel, *, over: ServedModel) -> None:
        self.adapters.promote_candidate(self.name)

    def close(self, model: ServedModel) -> None:
        self.adapters.unload_candidate(self.name)
