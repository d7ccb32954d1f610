"""What we use of tensorrt_llm: the table is what we pass, and an installed package that differs from it is found."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.tensorrt_llm import target
from llmserve.builder.targets.tensorrt_llm.ranks import RankJob, build_rank
from llmserve.core import BeamSearch, GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings, GpuSettings
from llmserve.engine.tensorrt_llm.library import Mode, installed
from llmserve.engine.tensorrt_llm.names import NAMES, Name, compare
from tests.checkpoints import make_checkpoint
from tests.fakes.gpu_machine import altered, gpu_machine

EVERYTHING = SamplingParams(
    max_tokens=6, min_tokens=1, temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
    presence_penalty=0.1, frequency_penalty=0.1, seed=3,
)  # fmt: skip
EVERY_SETTING = GpuSettings(
    max_beam_width=2, enable_chunked_context=True, max_attention_window_size=(64,), sink_token_length=4,
    kv_cache_host_memory_bytes=1 << 20, kv_cache_onboard_blocks=True, iter_stats_max_iterations=7,
    gpu_device_ids=(0, 1), normalize_log_probs=True, multi_block_mode=True, enable_context_fmha_fp32_acc=True,
    cuda_graph_mode=True, cuda_graph_cache_size=4, gpu_weights_percent=1.0,
)  # fmt: skip


@dataclass
class Calls:
    """Of everything in the table that is called."""

    keywords: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_positional: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def watch(self, name: Name, monkeypatch: pytest.MonkeyPatch) -> None:
        owner: Any = import_module(name.module)
        *path, last = name.attribute.split(".")
        for part in path:
            owner = getattr(owner, part)
        found = getattr(owner, last)
        is_class = inspect.isclass(found)
        target, attribute = (found, "__init__") if is_class else (owner, last)
        original = getattr(target, attribute)
        of_class = inspect.ismethod(original)
        call = original.__func__ if of_class else original

        def recording(*values: Any, **named: Any) -> Any:
            self.keywords[str(name)] |= set(named)
            given = len(values) - (is_class or of_class)
            self.num_positional[str(name)] = max(self.num_positional[str(name)], given)
            return call(*values, **named)

        monkeypatch.setattr(target, attribute, classmethod(recording) if of_class else recording)


def build_here(jobs: Sequence[RankJob], num_workers: int) -> str:
    return ", ".join({build_rank(job) for job in jobs})


async def ask(engine: Engine, request: GenerateRequest) -> None:
    async for _ in engine.submit(request):
        pass


async def use_everything(engine: Engine) -> None:
    request = GenerateRequest(
        "r", (11, 12, 13), EVERYTHING, end_id=2, stop_ids=((7, 8),), bad_ids=((9, 10),), embedding_bias=((5, 1.0),),
        return_log_probs=True, priority=1, deadline=time.monotonic() + 60,
    )  # fmt: skip
    await ask(engine, request)
    await ask(engine, GenerateRequest("beams", (11, 12), SamplingParams(max_tokens=4), beam=BeamSearch(2, 1.0, 1, 0.5)))
    stream = engine.submit(GenerateRequest("cancelled", (11, 12), SamplingParams(max_tokens=100)))
    await anext(stream)
    await stream.aclose()
    assert engine.healthy()
    engine.stats()


@pytest.mark.parametrize("release", ["1.2", "1.3"])
async def test_the_table_is_what_we_pass(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither more nor less: what an installed package is checked against is what will be asked of it."""
    checkpoint = make_checkpoint(tmp_path / "hf", "llama", hidden_size=128, intermediate_size=256)
    flags = {"target": "tensorrt_llm", "dtype": "float16", "tp_size": 2, "max_beam_width": 2, "max_batch_size": 4}
    monkeypatch.setattr(target, "build_ranks", build_here)  # another process would keep its calls to itself
    calls = Calls()
    with gpu_machine(release, FAKE_TRTLLM_EVENT_S="0.02"):  # so that there is something left to cancel
        mode = installed().mode
        called = [name for name in NAMES[mode] if name.is_called and name.attribute != "TorchLlmArgs"]
        for name in called:
            calls.watch(name, monkeypatch)
        build_engine(checkpoint, tmp_path / "e", BuildOptions.from_flat(flags))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # a rank's build saw one GPU
        engine = open_engine(tmp_path / "e", EngineSettings(gpu=EVERY_SETTING))
        await use_everything(engine)
        if mode is Mode.LLM:
            await asyncio.sleep(0.3)  # statistics are polled
        engine.close()
    assert {str(name): calls.num_positional[str(name)] for name in called} == {
        str(name): name.num_positional for name in called
    }
    expected = {str(name): set(name.parameters) for name in called}
    if mode is Mode.LLM:  # LLM hands its keywords on
        (handed_on,) = [name for name in NAMES[mode] if name.attribute == "TorchLlmArgs"]
        expected["tensorrt_llm.LLM"] = set(handed_on.parameters)
    assert {name: calls.keywords[name] for name in expected} == expected


@pytest.mark.parametrize("release", ["1.2", "1.3"])
def test_the_fakes_have_every_name_that_we_use(release: str) -> None:
    with gpu_machine(release):
        compared = compare(installed().mode)
    assert (compared.problems, compared.untold) == ((), ())
    assert compared.num_names > 10


def test_a_package_of_another_release_is_told_apart() -> None:
    with gpu_machine("1.3"):
        found = compare(Mode.ENGINE).problems
    assert "tensorrt_llm.builder.build: No module named 'tensorrt_llm.builder'" in found
    assert len(found) > 10


def test_every_kind_of_difference_is_found(tmp_path: Path) -> None:
    executor = "bindings/executor"
    release = altered("1.2", tmp_path / "altered", {
        f"{executor}/enums.py": ("TIMED_OUT = 4", "TIMEOUT = 4"),
        f"{executor}/config.py": ("host_cache_size: int", "host_cache_bytes: int"),
        f"{executor}/request.py": ("max_tokens: int, *, streaming", "max_tokens: int, /, *, streaming"),
        f"{executor}/response.py": ("num_reused_blocks: int", "reused: int"),
        f"{executor}/executor.py": ("def cancel_request(self, id", "def cancel_request(self, *, id"),
        "builder.py": ("build_config: BuildConfig)", "build_config: BuildConfig, device: str)"),
        "models/modeling_utils.py": ("def set_rank(self", "def set_mapping(self"),
    })  # fmt: skip
    with gpu_machine(release):
        found = compare(Mode.ENGINE).problems
    bindings = "tensorrt_llm.bindings.executor"
    assert sorted(found) == sorted([
        f"{bindings}.FinishReason has no TIMED_OUT",
        f"{bindings}.KvCacheConfig takes no parameter host_cache_size",
        f"{bindings}.Request takes no parameter input_token_ids",
        f"{bindings}.Request takes no parameter max_tokens",
        f"{bindings}.KvCacheMetrics has no num_reused_blocks",
        f"{bindings}.Executor.cancel_request takes 1 positional arguments, but we pass 2",
        "tensorrt_llm.builder.build requires a parameter device, which we do not pass",
        "tensorrt_llm.models.modeling_utils.PretrainedConfig.set_rank: type object 'PretrainedConfig' has no attribute "
        "'set_rank'",
    ])  # fmt: skip
