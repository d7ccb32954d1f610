"""Number formats stay what they are: every byte of an engine file in each of them, and what is said about it.

A change of these is a change of engines that are already in use. The network has ALiBi, whose slopes are powers of two:
a rotary embedding's numbers are not the same to the last bit on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.config import engine_config
from llmserve.builder.digest import engine_digest
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params
from llmserve.builder.targets.base import CompileJob, Network, Target
from llmserve.builder.targets.cpu.target import CpuTarget
from llmserve.builder.targets.cuda.compiler import Compiled
from llmserve.builder.targets.cuda.target import CudaTarget
from llmserve.cli.build import default_output_dir
from llmserve.engine.cuda.layout import Kernel
from llmserve.engine.directory.artifact import ENGINE_FILE
from llmserve.models.registry import architecture_for
from tests.builder.targets.test_lowered_networks import with_short_numbers
from tests.checkpoints import KINDS
from tests.engine.cpu.networks import LIMITS, odd_network
from tests.engine.directories import MANIFEST

DIGESTS = {  # dtype, quantization, kv_cache_dtype: engine files for cpu and cuda, what is said
    ("float32", "", "auto"): ("6ea83f7ae0c5f513", "cf4ff74c88105836", "84e4793a38c68a5d"),
    ("float16", "", "auto"): ("dd30efa0fcc7bce0", "9dc977d1df130814", "03eaa66a42d13a0c"),
    ("bfloat16", "", "auto"): ("af40e3c82a921fc5", "6e88ccbe5c00ce67", "3b52fc8932546b30"),
    ("float16", "", "int8"): ("ceca8de510bc3a95", "e8ad051bac077137", "a7e3d1fb0dac1d74"),
    ("float16", "int8", "auto"): ("e49224c7aa1edc97", "b3b2f93742393ec3", "f879d099ba931b4f"),
    ("bfloat16", "int8", "int8"): ("91a0c95f9d172d15", "4289132fc0eb2144", "65a40d9466fa64a2"),
    ("float16", "int4", "auto"): ("a6447ad8f1deb18f", "163198ddeccd6b56", "5b6436bd2f1c07ec"),
    ("float32", "int4", "int8"): ("142038f8601a5a22", "a1f8e22f1d72252d", "4d8dda7e03511783"),
}


class NamingCompiler:
    version = "names"

    def compile(self, kernels: Sequence[Kernel], architecture: str, threads: int) -> Iterator[Compiled]:
        for kernel in kernels:
            yield Compiled(repr(kernel).encode(), kernel.function, 32 * kernel.num_warps, 0, len(kernel.types), 0, 0)


@pytest.mark.parametrize("formats", list(DIGESTS), ids=lambda formats: "-".join(filter(None, formats)))
def test_an_engine_in_a_format_does_not_change(formats: tuple[str, str, str], tmp_path: Path) -> None:
    dtype, quantization, kv_cache_dtype = formats
    options = replace(LIMITS, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    targets: list[Target] = [CpuTarget(), CudaTarget(NamingCompiler())]
    files = [_engine_file(target, replace(options, target=target.name), tmp_path) for target in targets]
    assert (*map(_digest, files), _digest(_said(options, targets))) == DIGESTS[formats]


def _engine_file(target: Target, options: BuildOptions, folder: Path) -> bytes:
    network = odd_network(alibi=True)
    program, options = with_short_numbers(network.program), replace(options, given={"gpu": "sm_90"})
    load = partial(network.load, dtype=options.dtype)
    target.compile(CompileJob(program, network.params, options, load, lambda what, num_bytes: None), folder)
    return (folder / ENGINE_FILE).read_bytes()


def _said(options: BuildOptions, targets: Sequence[Target]) -> bytes:
    """The words and numbers of config.json, manifest.json, a plan, and names."""
    config = KINDS["baichuan2-13b"]
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    program, params = with_short_numbers(architecture.program(spec)), architecture.params(spec)
    words: list[Any] = [engine_config(spec, program, options), engine_digest(program, options, {})]
    words[0].pop("version")
    for target in targets:
        words += [target.cache_format(options).name, target.kv_bytes_per_token(program, options)]
        words.append(target.engine_bytes(Network(program, params, options), quantized_params(program, params, options)))
    words += [replace(MANIFEST, options=options.as_dict()).dtype, str(default_output_dir(Path("network"), options))]
    return json.dumps(words, sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
