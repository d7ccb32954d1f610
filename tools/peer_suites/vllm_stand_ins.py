"""A pytest plug-in for vLLM's suite: stand-ins for the suite's imports of vLLM, as far as cases with a server use them.

`tests.utils.RemoteOpenAIServer` starts `llmserve serve` with the engine. Modules `vllm...` have every name; calling one
reports it as lacking.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.machinery
import inspect
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tools.peer_suites.vllm_flags import translate

START_S = 60
FIXTURES = {"server", "client", "server_with_store", "chat_client_with_force_include_usage", "server_fixture"}


class RemoteOpenAIServer:
    """The part of the suite's interface that its cases use."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        auto_port: bool = True,
        **_: Any,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.host = "127.0.0.1"
        flags = translate(model, vllm_serve_args, Path(os.environ["PEER_TEMPLATES"]))
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            keys = Path(tempfile.mkstemp(suffix=".yaml")[1])  # with its SHA-256, because the key itself is too short
            keys.write_text(f"keys: [{{name: suite, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}]")
            flags += ["--api-keys", str(keys)]
        own = ["--host", self.host, "--http-port", str(self.port), "--grpc-port", "0", "--metrics-port", "0"]
        command = [os.environ["PEER_PROGRAM"], "serve", os.environ["PEER_ENGINE"], *own, *flags]
        self._process = subprocess.Popen(command, env={**os.environ, **(env_dict or {})})

    def __enter__(self) -> RemoteOpenAIServer:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise RuntimeError("llmserve lacks: a flag or a key of this server, see its output")
            try:
                if httpx.get(self.url_for("health")).status_code == httpx.codes.OK:
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.OpenAI(**self._openai(kwargs))

    def get_async_client(self, **kwargs: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._openai(kwargs))

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key=self.DUMMY_API_KEY, max_retries=0, **kwargs)

    def _openai(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, **kwargs}


class EngineTokenizer:
    """The engine's tokenizer, with the methods of transformers' that cases call."""

    def __init__(self) -> None:
        from llmserve.stages.files import TextFiles
        from llmserve.stages.tokenizer import tokenizer_of

        self._tokenizer = tokenizer_of(TextFiles.read(Path(os.environ["PEER_ENGINE"])))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        listed = [ids] if isinstance(ids, int) else [*ids]
        return self._tokenizer.decode(listed, skip_special_tokens=skip_special_tokens)


class Lacking:
    """Stands in for any class or function of vLLM; modules may use it during their import."""

    is_asked = False

    def __init__(self, *_: object, **__: object) -> None:
        if self.is_asked:
            raise RuntimeError("llmserve lacks: functions of vLLM, without a server")

    def __class_getitem__(cls, _: object) -> type[Lacking]:
        return cls

    def __getattr__(self, name: str) -> Any:
        return Lacking


class Hub:
    """Downloads nothing: adapters are only names, and the base network answers for them."""

    def snapshot_download(self, repo_id: str, **_: object) -> str:
        return repo_id


class StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = {"get_tokenizer": lambda *_, **__: EngineTokenizer(), "hf_api": Hub, "current_platform": Platform()}
        found = known.get(name) or type(name, (Lacking,), {})
        setattr(self, name, found)
        return found


class Platform:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module whose name begins with vllm."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: there is no code to run."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    sys.meta_path.insert(0, Finder())
    utils = ModuleType("tests.utils")
    utils.__dict__.update(RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[], ROCM_ENV_OVERRIDES={})
    sys.modules["tests.utils"] = utils
    early_config.addinivalue_line("markers", "skip_global_cleanup: vLLM's")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asking = [item for item in items if _asks(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def pytest_runtest_setup() -> None:
    Lacking.is_asked = True


def _asks(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return bool(FIXTURES & set(item.fixturenames)) or "RemoteOpenAIServer" in inspect.getsource(item.function)
