"""The checkpoint in canonical form that newer TensorRT-LLM is given: the same network, in published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.targets.tensorrt_llm.canonical import canonical_bytes, canonical_problems, write_canonical
from llmserve.checkpoint.plan import plan_weights
from llmserve.checkpoint.reader import Checkpoint
from llmserve.models.registry import architecture_for
from tests.builder.targets.tensorrt_llm.jobs import opened

OPTIONS = BuildOptions(dtype="bfloat16", target="tensorrt_llm")


@pytest.mark.parametrize("kind", ["baichuan2-7b", "llama3-rope", "llama-tied", "mistral", "qwen2", "qwen3"])
def test_it_is_read_back_as_the_same_network(kind: str, tmp_path: Path) -> None:
    with opened(tmp_path / "hf", kind, OPTIONS) as source:
        (tmp_path / "out").mkdir()
        write_canonical(source.job, tmp_path / "out", spec=source.spec, config=source.config)
        with Checkpoint.open(tmp_path / "out") as checkpoint:
            architecture = architecture_for(checkpoint.config)
            spec = architecture.from_hf(checkpoint.config)
            assert architecture.program(spec) == source.job.program
            weights = plan_weights(checkpoint, architecture.params(spec), ())
            for param in source.job.params:
                np.testing.assert_array_equal(weights.load(param.name, "bfloat16"), source.param(param.name))
        expected = canonical_bytes(source.job.params, source.spec, OPTIONS)
        assert sum(info.nbytes for info in checkpoint.tensors.values()) == expected


def test_baichuan_needs_no_remote_code(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "baichuan2-7b", OPTIONS) as source:
        (tmp_path / "out").mkdir()
        write_canonical(source.job, tmp_path / "out", spec=source.spec, config=source.config)
    config: dict[str, Any] = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (config["eos_token_id"], config["torch_dtype"]) == (2, "bfloat16")
    assert "auto_map" not in config


def test_what_the_llm_class_has_not_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "hf", "baichuan2-13b", OPTIONS) as source:
        (problem,) = canonical_problems(source.spec, OPTIONS)
    assert "ALiBi" in problem
    assert "1.2.1" in problem
    with opened(tmp_path / "llama", "llama", OPTIONS) as source:
        (problem,) = canonical_problems(source.spec, BuildOptions(quantization="int8"))
    assert "does not quantize" in problem
