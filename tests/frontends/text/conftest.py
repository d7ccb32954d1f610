"""OpenAI's API over the shipped pipelines and an engine whose answers can be worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import openai
import pytest

from llmserve.backends.python.backend import PythonBackend
from llmserve.backends.tensorrtllm import TensorrtLlmBackend
from llmserve.engine.base import Engine, RunnerInfo
from llmserve.engine.fake import fake_answer, fake_engine
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.log_settings import LogControl
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.shared.tracer import Tracer
from llmserve.serving.backend import Backend
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.settings import ControlMode
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.backends.tensorrtllm.models import PIPELINES
from tests.frontends.server import STRICT, RunningServer, running_server
from tests.stages.conftest import write_baichuan

VOCAB_SIZE, END_ID = 620, 2
LIMITS = RunnerInfo(
    vocab_size=VOCAB_SIZE, block_size=4, num_blocks=512, max_num_tokens=64, max_batch_size=32, max_seq_len=256
)


@pytest.fixture(scope="session")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine")
    write_baichuan(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(text_dir: Path) -> Tokenizer:
    return load_tokenizer(text_dir)


@pytest.fixture(scope="module")
def served(text_dir: Path) -> Iterator[RunningServer]:
    with serving(text_dir) as running:
        yield running


@contextmanager
def serving(
    text_dir: Path,
    api_keys: ApiKeys | None = None,
    logs: LogControl | None = None,
    tracer: Tracer | None = None,
    open_engine: Callable[[], Engine] = lambda: fake_engine(LIMITS),
    text: TextSettings = STRICT,
    preprocessing: Mapping[str, str] = MappingProxyType({}),
    engine: Mapping[str, str] = MappingProxyType({}),
    control_mode: ControlMode = ControlMode.NONE,
) -> Iterator[RunningServer]:
    """`preprocessing`, `engine`: further parameters of these steps."""
    tokenizer_dir = {"tokenizer_dir": str(text_dir)}
    settings = ServerSettings(
        (PIPELINES,),
        parameter_overrides={
            "preprocessing": {**tokenizer_dir, **preprocessing},
            "postprocessing": tokenizer_dir,
            "tensorrt_llm": {"gpt_model_path": str(text_dir), **engine},
        },
        control_mode=control_mode,
        load_at_start=("*",) if control_mode is ControlMode.EXPLICIT else (),
    )
    backends: dict[str, Backend] = {
        "tensorrtllm": TensorrtLlmBackend(lambda path, limits: open_engine()),
        "python": PythonBackend(),
    }
    made = running_server(
        lambda: InferenceCore(settings, backends), api_keys=api_keys, logs=logs, tracer=tracer, text=text
    )
    with made as running:
        core = running.core
        assert isinstance(core, InferenceCore)
        asyncio.run_coroutine_threadsafe(core.start(), running.loop).result(60)
        assert core.ready(), core.repository_index()
        yield running
        asyncio.run_coroutine_threadsafe(core.stop(10), running.loop).result(20)


@pytest.fixture(scope="module")
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.http_url, timeout=60) as made:
        yield made


def expected_ids(prompt_ids: list[int], num_tokens: int) -> list[int]:
    answer = fake_answer(prompt_ids, num_tokens, VOCAB_SIZE)
    return answer[: answer.index(END_ID)] if END_ID in answer else answer


def expected_text(tokenizer: Tokenizer, prompt_ids: list[int], num_tokens: int) -> str:
    return tokenizer.decode(expected_ids(prompt_ids, num_tokens))
