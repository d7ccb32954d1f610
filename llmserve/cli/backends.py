"""The composition root: the backends of a server. The core only knows their names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.onnxruntime import OnnxRuntimeBackend
from llmserve.backends.onnxruntime.backend import DEFAULT_MAX_BATCH_SIZE
from llmserve.backends.python.backend import PythonBackend
from llmserve.backends.pytorch import PyTorchBackend
from llmserve.backends.repeat import RepeatBackend
from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.engine.base import Engine
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import GateRule, require_gate
from llmserve.engine.open import open_engine
from llmserve.engine.remote.process import ProcessEngine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import InvalidArgument
from llmserve.serving.backend import Backend
from llmserve.wire.request_memory import RequestMemory

OpenEngine: TypeAlias = Callable[[Path, EngineSettings], Engine]
MAX_BATCH_SIZE = "default-max-batch-size"
ENGINE_PROCESS = (sys.executable, "-P", "-m", "llmserve.cli.engine_process")  # -P: no modules of the working directory
SETTINGS = {("", MAX_BATCH_SIZE), (OnnxRuntimeBackend.name, MAX_BATCH_SIZE)}  # (backend, or "" for all; key)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """`--backend-config`: (backend, or "" for all of them; key) -> value."""

    values: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def unread(self) -> list[str]:
        return [f"--backend-config {','.join(filter(None, name))}" for name in self.values if name not in SETTINGS]

    def max_batch_size(self, backend: str) -> int:
        text = self.values.get((backend, MAX_BATCH_SIZE)) or self.values.get(("", MAX_BATCH_SIZE), "")
        if text and not (text.isascii() and text.isdigit()):
            raise InvalidArgument(f"--backend-config {MAX_BATCH_SIZE}={text}: expected a number")
        return int(text) if text else DEFAULT_MAX_BATCH_SIZE


def parse_backend_settings(texts: Sequence[str]) -> BackendSettings:
    values: dict[tuple[str, str], str] = {}
    for text in texts:
        name, comma, setting = text.partition(",")
        if not comma:
            name, setting = "", text
        key, equals, value = setting.partition("=")
        if not (key and equals and value) or (comma and not name):
            raise InvalidArgument(f"--backend-config {text}: expected BACKEND,KEY=VALUE or KEY=VALUE")
        values[name, key] = value
    return BackendSettings(values)


def open_gated(gate: GateRule | None, opened: OpenEngine, path: Path, settings: EngineSettings) -> Engine:
    if gate is not None:
        require_gate(EngineDirectory.open(path), gate)
    return opened(path, settings)


def open_process(gate: GateRule | None, engine_dir: Path, tokenizer_dir: Path, settings: EngineSettings) -> Engine:
    """Open an engine in its own process. The gate is checked once, here: a restart requires the same digest."""
    if gate is not None:
        require_gate(EngineDirectory.open(engine_dir), gate)
    return ProcessEngine(ENGINE_PROCESS, engine_dir, tokenizer_dir, settings)


def open_elsewhere(opened: OpenEngine, engine_dir: Path, tokenizer_dir: Path, settings: EngineSettings) -> Engine:
    """Replaces `open_process` if engines run elsewhere, because they have their own processes already."""
    return opened(engine_dir, settings)


def make_backends(
    settings: BackendSettings,
    gate: GateRule | None = None,
    open_cluster: OpenEngine | None = None,
    *,
    verify_every_s: float = 0.0,
    memory: RequestMemory | None = None,
) -> dict[str, Backend]:
    """Backends by their name in `config.pbtxt`. `gate`: the rule that engines must meet. `open_cluster`: opens a client
    of an engine elsewhere instead of each engine. `memory`: limits of requests."""
    opened = partial(open_gated, gate, open_cluster or open_engine)
    apart = partial(open_elsewhere, opened) if open_cluster else partial(open_process, gate)
    backends: tuple[Backend, ...] = (
        TensorrtLlmBackend(opened, apart, verify_every_s=verify_every_s, gate=gate),
        PythonBackend(memory),
        PyTorchBackend(),
        OnnxRuntimeBackend(settings.max_batch_size(OnnxRuntimeBackend.name)),
        IdentityBackend(),
        RepeatBackend(),
    )
    return {backend.name: backend for backend in backends}
