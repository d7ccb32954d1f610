"""OpenVINO GenAI's continuous batching pipeline, with its defaults, on a model that optimum-intel exported: paged
attention, KV cache in 8 bits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from tools.benchmark.cells import FIRST_ID
from tools.benchmark.environment import last_lines
from tools.benchmark.job import Job, Prepared

MAX_BATCH_TOKENS = 2048
CACHE_GIB = 1
KV_BYTES = 1  # 8 bits, the default on a CPU, without scales
WEIGHTS = "openvino_model.bin"
WEIGHT_FORMATS = {"float16": "fp16", "int8": "int8", "int4": "int4"}
LARGEST_SHARE = {"float16": 1.1, "int8": 0.6, "int4": 0.45}  # share of float16's bytes; some tensors stay wider


def model_directory(job: Prepared) -> Path:
    return job.file(f"openvino-{job.precision}")


def prepare(job: Prepared) -> None:
    """Runs `optimum-cli export openvino --weight-format fp16|int8|int4` with its defaults. If a row does not divide
    into int4's groups, groups are smaller."""
    directory = model_directory(job)
    if directory.is_dir():
        return
    staged = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    program = Path(sys.executable).with_name("optimum-cli")
    options = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
    options += ["--model", str(job.checkpoint), "--weight-format", WEIGHT_FORMATS[job.precision]]
    options += ["--group-size-fallback", "adjust"] if job.precision == "int4" else []
    done = subprocess.run([program, "export", "openvino", *options, staged], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"optimum-cli failed: {last_lines(done.stderr)}")
    check_precision(job, (staged / WEIGHTS).stat().st_size)
    staged.rename(directory)


def check_precision(job: Prepared, num_bytes: int) -> None:
    """Raises if a model was not quantized, because it would be measured as if it were."""
    floats = sum(file.stat().st_size for file in job.checkpoint.glob("*.safetensors"))
    if json.loads((job.checkpoint / "config.json").read_text())["torch_dtype"] == "float32":
        floats //= 2
    if num_bytes > LARGEST_SHARE[job.precision] * floats:
        raise RuntimeError(f"the export for {job.precision} has {num_bytes} bytes of {floats} in float16")


def open_model(job: Job) -> GenaiModel:
    return GenaiModel(job)


class GenaiModel:
    """See `Model`. A cell's requests are added together; each `step` of the pipeline generates a token for each."""

    def __init__(self, job: Job) -> None:
        directory = model_directory(job)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_batched_tokens = MAX_BATCH_TOKENS
        scheduler.enable_prefix_caching = False
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY"}
        if job.adapter:
            adapter = genai.Adapter(str(job.folder / job.adapter / "adapter_model.safetensors"))
            options["adapters"] = genai.AdapterConfig(adapter)
        self._pipeline = genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", options)
        embedding_bytes = job.shape.head_products * (2 if job.precision == "float16" else 1)
        self.weight_bytes = (directory / WEIGHTS).stat().st_size - embedding_bytes
        self.kv_bytes_per_token = float(KV_BYTES * job.shape.kv_elements_per_token)
        self.versions = {"openvino": openvino.__version__, "openvino-genai": genai.__version__}
        self._config = genai.GenerationConfig()
        self._handles: list[Any] = []
        self._num_requests = 0
        if job.adapter:  # only `generate` passes the adapter to the network, which keeps it
            once = genai.GenerationConfig(max_new_tokens=1, adapters=options["adapters"])
            self._pipeline.generate([openvino.Tensor(np.array([[FIRST_ID]], np.int64))], [once])

    def prepare(self, batch: int, max_tokens: int) -> None:
        self._config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        for ids in prompts:
            tensor = openvino.Tensor(np.array([ids], np.int64))
            self._handles.append(self._pipeline.add_request(self._num_requests, tensor, self._config))
            self._num_requests += 1
        return self._read()

    def step(self) -> list[int]:
        return self._read()

    def release(self) -> None:
        for handle in self._handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._handles = []

    def _read(self) -> list[int]:
        """Steps until each request has a new token: once, or more often if prompts are split into chunks."""
        self._pipeline.step()
        while not all(handle.can_read() for handle in self._handles):
            self._pipeline.step()
        return [next(iter(handle.read().values())).generated_ids[-1] for handle in self._handles]
