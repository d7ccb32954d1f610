"""Engines for fake GPUs, built once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from tests.checkpoints import make_checkpoint
from tests.fakes.gpu_machine import gpu_machine


class Build(Protocol):
    def __call__(self, release: str, kind: str = ..., **options: Any) -> Path: ...


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("gpu-engines")

    @cache
    def built(release: str, kind: str, options: tuple[tuple[str, Any], ...]) -> Path:
        name = "-".join(map(str, [release, kind, *(value for _, value in options)]))
        sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
        if kind == "baichuan2-13b":
            sizes["num_attention_heads"] = 4
        checkpoint = make_checkpoint(folder / f"hf-{name}", kind, **sizes)
        values = {
            "dtype": "float16",
            "target": "tensorrt_llm",
            "max_batch_size": 4,
            "tokens_per_block": 8,
            **dict(options),
        }
        with gpu_machine(release):
            build_engine(checkpoint, folder / name, BuildOptions.from_flat(values))
        return folder / name

    def call(release: str, kind: str = "llama", **options: Any) -> Path:
        return built(release, kind, tuple(sorted(options.items())))

    return call
