"""The LoRA adapters of one model, by their names in requests.

A name leads to a digest; the engine only knows digests. When a name is reloaded, it leads to another adapter, but
requests that have started keep theirs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Container, Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmserve.backends.tensorrtllm.adapter_folder import AdapterFolder
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterEngine, Engine
from llmserve.engine.directory.gate_record import GateRecord, GateRule, GateSubject, require_record, standing
from llmserve.engine.directory.identity import gate_facts
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unsupported, nearest, raise_problems
from llmserve.serving.backend import GaugeSample
from llmserve.serving.types import InferRequest

NAME = re.compile(r"[A-Za-z0-9][\w.:@-]{0,127}")  # used in paths and as a label of metrics


def adapter_name(request: InferRequest) -> str:
    """The name that a request selects; empty: none. Raises NotFound if its API key may not use the adapter."""
    name, allowed = request.asked_adapter, request.tenant.adapters
    if name and allowed is not None and name not in allowed:
        raise NotFound(f"there is no adapter '{name}' for this API key")
    return name


@dataclass(slots=True, eq=False)
class _Named:
    adapter: SealedAdapter
    gates: Sequence[GateRecord]
    num_requests: int = 0  # requests in progress
    num_asked: int = 0  # requests since it has its name
    is_served: bool = True  # requests under its name


class _Candidate(NamedTuple):
    """A rollout's candidate for a name."""

    tried: _Named
    beside: _Named  # the adapter with the name


class ServedAdapters:
    def __init__(self, engine: Engine, gate: GateRule | None = None) -> None:
        """`gate`: what every adapter must have passed."""
        self._engine = engine
        self._gate = gate
        self._named: dict[str, _Named] = {}
        self._candidates: dict[str, _Candidate] = {}
        self._folder: AdapterFolder | None = None
        self._lock = threading.Lock()  # names are loaded in other threads than the requests' thread

    def load_all(self, directories: Mapping[str, Path]) -> None:
        """Raises one InvalidArgument listing all that cannot be loaded."""
        problems = []
        for name, path in directories.items():
            try:
                self.load(name, path)
            except LlmserveError as error:
                problems.append(f"{name}: {error}")
        raise_problems(InvalidArgument, "adapters cannot be loaded", problems)

    def load(self, name: str, path: Path) -> None:
        """Load under this name, and replace the previous adapter. Reads all files, so not for the event loop."""
        if not NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!r} is not a valid adapter name: use up to 128 letters, digits and . _ - : @, without a slash"
            )
        added = self._added(path)
        with self._lock:
            replaced = self._named.get(name)
            self._named[name] = added
            if replaced is not None:
                self._retire(replaced)

    def load_candidate(self, name: str, path: Path) -> str:
        """See `Adapters`. Clients cannot request it."""
        added = self._added(path)
        with self._lock:
            try:
                beside = self._find(name)
                if beside.adapter.digest == added.adapter.digest:
                    raise InvalidArgument(f"'{name}' is the adapter in {path} already: the digests are equal")
            except InvalidArgument:
                self._retire(added)
                raise
            self._candidates[name] = _Candidate(added, beside)
        return added.adapter.digest

    def promote_candidate(self, name: str) -> None:
        with self._lock:
            tried, beside = self._candidates[name]
            if self._named.get(name) is not beside:
                raise InvalidArgument(f"adapter '{name}' was reloaded or unloaded in the meantime")
            del self._candidates[name]
            self._named[name] = tried
            self._retire(beside)

    def unload_candidate(self, name: str) -> None:
        with self._lock:
            self._retire(self._candidates.pop(name).tried)

    def serve_folder(self, path: Path) -> None:
        """Serve the folder's adapters, and update them at every `poll`. Adapters that cannot be loaded are logged."""
        self._taking()
        self._folder = AdapterFolder(path, self)
        self.poll()

    def poll(self, models: Container[str] = ()) -> None:
        """Check the folder again, if there is one. Blocking. `models`: names that an adapter may not have."""
        if self._folder is not None:
            self._folder.poll(models)

    @property
    def names(self) -> KeysView[str]:
        return self._named.keys()

    def unload(self, name: str) -> None:
        with self._lock:
            self._retire(self._find(name))
            del self._named[name]

    @contextmanager
    def held(self, name: str, *, candidate: bool = False) -> Iterator[str]:
        """The digest of the adapter that has this name now, which stays loaded inside the block; empty for no name.

        `candidate`: use a rollout's candidate for the name, if there is one.
        """
        if not name:
            yield ""
            return
        with self._lock:
            named = self._candidates[name].tried if candidate and name in self._candidates else self._find(name)
            named.num_requests += 1
            named.num_asked += 1
        try:
            yield named.adapter.digest
        finally:
            with self._lock:
                named.num_requests -= 1
                self._drop(named)

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Facts about each, for clients."""
        return {
            name: {"digest": named.adapter.digest, "base": named.adapter.manifest.base_digest,
                   "rank": named.adapter.manifest.rank, "gate": gate_facts(named.gates)}
            for name, named in self._sorted()
        }  # fmt: skip

    def gauges(self) -> list[GaugeSample]:
        """Of named adapters and candidates: how often each was requested under its name."""
        with self._lock:
            tried = [(name, candidate.tried) for name, candidate in self._candidates.items()]
        return [
            ("llmserve_adapter_requests_total", {"adapter": name, "digest": named.adapter.digest}, named.num_asked)
            for name, named in (*self._sorted(), *tried)
        ]

    def _added(self, path: Path) -> _Named:
        """Add the adapter in a directory to the engine."""
        engine = self._taking()
        adapter = SealedAdapter.open(path)
        if self._gate is not None:
            adapter.require_base(engine.info.digest)
            require_record(GateSubject(path, engine.info.digest, engine.info.kernels, adapter.digest), self._gate)
        gates = standing(path, engine.info.digest, adapter.digest)
        engine.add_adapter(adapter)
        return _Named(adapter, gates)

    def _taking(self) -> AdapterEngine:
        if isinstance(self._engine, AdapterEngine):
            return self._engine
        raise Unsupported(
            "an engine in a cluster or on several devices does not support adapters; serve without --cluster, or "
            "merge the adapter into an engine with: llmserve build CHECKPOINT --lora ADAPTER"
        )

    def _sorted(self) -> list[tuple[str, _Named]]:
        with self._lock:
            return sorted(self._named.items())

    def _find(self, name: str) -> _Named:
        if (named := self._named.get(name)) is None:
            raise InvalidArgument(f"there is no adapter '{name}'{nearest(name, self._named)}")
        return named

    def _retire(self, named: _Named) -> None:
        named.is_served = False
        self._drop(named)

    def _drop(self, named: _Named) -> None:
        """Remove it from the engine if it has no name and no request."""
        if not named.is_served and not named.num_requests and isinstance(self._engine, AdapterEngine):
            self._engine.remove_adapter(named.adapter.digest)
