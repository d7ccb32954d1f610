"""The LoRA adapters of one model, by the names that requests have for them.

A name is a way to find a digest, and the engine knows digests only. A name that is loaded again is another adapter:
requests that have begun keep the one that they have found.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.backends.tensorrtllm.adapter_folder import AdapterFolder
from llmserve.engine.adapters.sealed import SealedAdapter
from llmserve.engine.base import AdapterEngine, Engine
from llmserve.engine.directory.gate_record import GateRecord, GateRule, GateSubject, require_record, standing
from llmserve.engine.directory.identity import gate_facts
from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unsupported, nearest, raise_problems
from llmserve.serving.backend import GaugeSample
from llmserve.serving.types import ADAPTER_ID, ADAPTER_NAME, InferRequest

NAME = re.compile(r"[A-Za-z0-9][\w.:@-]{0,127}")  # a part of a path, and a label of a metric


def adapter_name(request: InferRequest) -> str:
    """That a request asks for. Empty: none. Raises NotFound for one that its API key may not use."""
    name, allowed = _asked_name(request), request.tenant.adapters
    if name and allowed is not None and name not in allowed:
        raise NotFound(f"there is no adapter '{name}' for this API key")
    return name


def _asked_name(request: InferRequest) -> str:
    """Its parameter, or TensorRT-LLM's number."""
    name, ids = request.parameters.get(ADAPTER_NAME, ""), request.inputs.get(ADAPTER_ID)
    if not isinstance(name, str):
        raise InvalidArgument(f"{ADAPTER_NAME} must be a text, the name of an adapter")
    if ids is None or not ids.data.size:
        return name
    number = str(ids.data.reshape(-1)[0])
    if ids.data.size > 1 or name not in ("", number):
        raise InvalidArgument(f"{ADAPTER_ID} must be one number, and that of {ADAPTER_NAME} if both are given")
    return number


@dataclass(slots=True, eq=False)
class _Named:
    adapter: SealedAdapter
    gates: Sequence[GateRecord]
    num_requests: int = 0  # under way
    num_asked: int = 0  # since it has its name
    is_served: bool = True  # under its name


class ServedAdapters:
    def __init__(self, engine: Engine, gate: GateRule | None = None) -> None:
        """`gate`: what each must have passed."""
        self._engine = engine
        self._gate = gate
        self._named: dict[str, _Named] = {}
        self._folder: AdapterFolder | None = None
        self._lock = threading.Lock()  # names are loaded in other threads than the one of requests

    def load_all(self, directories: Mapping[str, Path]) -> None:
        """Raises one InvalidArgument for all that cannot be loaded."""
        problems = []
        for name, path in directories.items():
            try:
                self.load(name, path)
            except LlmserveError as error:
                problems.append(f"{name}: {error}")
        raise_problems(InvalidArgument, "adapters cannot be loaded", problems)

    def load(self, name: str, path: Path) -> None:
        """Under this name from here on, in place of what had it. Reads all of it, so not on the event loop."""
        if not NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!r} is no name for an adapter: letters, digits and . _ - : @, up to 128, are, and no slash"
            )
        engine = self._taking()
        adapter = SealedAdapter.open(path)
        if self._gate is not None:
            adapter.require_base(engine.info.digest)
            require_record(GateSubject(path, engine.info.digest, engine.info.kernels, adapter.digest), self._gate)
        gates = standing(path, engine.info.digest, adapter.digest)
        engine.add_adapter(adapter)
        with self._lock:
            replaced = self._named.get(name)
            self._named[name] = _Named(adapter, gates)
            if replaced is not None:
                self._retire(replaced)

    def serve_folder(self, path: Path) -> None:
        """What is in it now, and at every `poll`. What cannot be loaded is logged."""
        self._taking()
        self._folder = AdapterFolder(path, self)
        self.poll()

    def poll(self) -> None:
        """Look at the folder again, if there is one. Blocking."""
        if self._folder is not None:
            self._folder.poll()

    @property
    def names(self) -> KeysView[str]:
        return self._named.keys()

    def unload(self, name: str) -> None:
        with self._lock:
            self._retire(self._find(name))
            del self._named[name]

    @contextmanager
    def held(self, name: str) -> Iterator[str]:
        """The digest of the adapter that has this name now, which stays meanwhile; empty for no name."""
        if not name:
            yield ""
            return
        with self._lock:
            named = self._find(name)
            named.num_requests += 1
            named.num_asked += 1
        try:
            yield named.adapter.digest
        finally:
            with self._lock:
                named.num_requests -= 1
                self._drop(named)

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """Of each, for clients."""
        return {
            name: {"digest": named.adapter.digest, "base": named.adapter.manifest.base_digest,
                   "rank": named.adapter.manifest.rank, "gate": gate_facts(named.gates)}
            for name, named in self._sorted()
        }  # fmt: skip

    def gauges(self) -> list[GaugeSample]:
        """Of those that have a name: how often each was asked for under it."""
        return [
            ("llmserve_adapter_requests_total", {"adapter": name, "digest": named.adapter.digest}, named.num_asked)
            for name, named in self._sorted()
        ]

    def _taking(self) -> AdapterEngine:
        if isinstance(self._engine, AdapterEngine):
            return self._engine
        raise Unsupported(
            "an engine in a cluster or on several devices takes no adapters; serve without --cluster, or merge the "
            "adapter into an engine with: llmserve build CHECKPOINT --lora ADAPTER"
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
        """Out of the engine, when it has no name and no request."""
        if not named.is_served and not named.num_requests and isinstance(self._engine, AdapterEngine):
            self._engine.remove_adapter(named.adapter.digest)
