"""Small models as files, and a core that serves them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llmserve.backends.identity import IdentityBackend
from llmserve.backends.onnxruntime import OnnxRuntimeBackend
from llmserve.backends.python.backend import PythonBackend
from llmserve.backends.pytorch import PyTorchBackend
from llmserve.backends.repeat import RepeatBackend
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.types import InferRequest, InferResponse, Tensor

BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (IdentityBackend(), PythonBackend(), PyTorchBackend(), OnnxRuntimeBackend(), RepeatBackend())
}


def write_model(repository: Path, name: str, config: str, code: str | None = None, version: int = 1) -> Path:
    """`<repository>/<name>/config.pbtxt` and, for a Python model, `<version>/model.py`.

    A server that polls sees a new version and its config at once, never half of them.
    """
    directory = repository / name
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.pbtxt"
    if not file.exists() or file.read_text() != config:
        beside = repository.with_name(f"{repository.name}-{name}.new")
        beside.write_text(config)
        beside.replace(file)
    (directory / str(version)).mkdir(exist_ok=True)
    if code is not None:
        (directory / str(version) / "model.py").write_text("import triton_python_backend_utils as pb_utils\n" + code)
    return directory


def tensors(kind: str, **dims: str) -> str:
    """`input`/`output` declarations: name -> "TYPE [dims] rest"."""
    entries = []
    for name, text in dims.items():
        data_type, rest = text.split(" ", 1)
        entries.append(f'{kind} {{ name: "{name}" data_type: TYPE_{data_type} dims: {rest} }}')
    return "\n".join(entries)


def identity_config(extra: str = "", dims: str = "[ -1 ]") -> str:
    return f'backend: "identity"\n{tensors("input", X=f"FP32 {dims}")}\n{tensors("output", Y=f"FP32 {dims}")}\n{extra}'


@asynccontextmanager
async def serving(repository: Path, drain_s: float = 1.0, **settings: Any) -> AsyncIterator[InferenceCore]:
    core = InferenceCore(ServerSettings((repository,), **settings), BACKENDS)
    await core.start()
    try:
        yield core
    finally:
        await core.stop(drain_s)


def floats(*values: float, name: str = "X") -> Tensor:
    return Tensor(name, "FP32", np.array(values, np.float32))


def request(model: str, *inputs: Tensor, **fields: Any) -> InferRequest:
    return InferRequest(model, {tensor.name: tensor for tensor in inputs}, **fields)


async def collect(core: InferenceCore, wanted: InferRequest) -> list[InferResponse]:
    async with aclosing(core.infer_stream(wanted)) as stream:
        return [response async for response in stream]


async def single(core: InferenceCore, wanted: InferRequest) -> InferResponse:
    """The one response; raises its error."""
    (response,) = await collect(core, wanted)
    if response.error is not None:
        raise response.error
    return response


def values(response: InferResponse, name: str = "Y") -> list[Any]:
    tensor = response.output(name)
    assert tensor is not None
    result: list[Any] = tensor.data.tolist()
    return result


async def appears(file: Path, timeout_s: float = 30.0) -> bool:
    """Wait for a file that a model writes from its thread."""
    for _ in range(int(timeout_s / 0.01)):
        if await asyncio.to_thread(file.exists):
            return True
        await asyncio.sleep(0.01)
    return False
