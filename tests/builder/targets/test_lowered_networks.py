"""Networks stay what they are: what every kind of tests/checkpoints.py is lowered to, as digests.

A change of these is a change of engines that are already in use. `program` is the engine digest without weights, the
others are everything of an engine file but its numbers, in float16 without and with quantization.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from llmserve.builder.digest import engine_digest
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params
from llmserve.builder.targets.cpu import lowering as cpu
from llmserve.builder.targets.cuda import lowering as cuda
from llmserve.builder.targets.cuda.tiles import tiles_for
from llmserve.engine.cpu.layout import DType
from llmserve.models.graph import Program
from llmserve.models.registry import architecture_for
from tests.checkpoints import KINDS, MIXTURES

OPTIONS = BuildOptions(dtype="float16", max_batch_size=4, max_num_tokens=32, max_seq_len=96, tokens_per_block=16)
QUANTIZATIONS = ("", "int8", "int4")
REFUSED_BY_CUDA = (*MIXTURES, "granite-swa", "phi")
DIGESTS = {  # kind: program, cpu, cuda
    "afmoe": ("dd1e7498d06db428", "509ab1ea0203e08a", "4f53cda18c2baa0c"),
    "arcee": ("c6bbcd35b47aff3b", "c91341a479b9380f", "63152d1936d08f61"),
    "baichuan1-7b": ("6e7b3a1923862566", "820f22f95f632681", "3044f68a112eca94"),
    "baichuan2-13b": ("0b6ff4295a627d2b", "aebc0930f8a7f6fe", "9c28df861475fcff"),
    "baichuan2-7b": ("6e7b3a1923862566", "820f22f95f632681", "3044f68a112eca94"),
    "bamba": ("a1d84b28b36de4ff", "dd01ffa24f6287bd", "a73ebdc1274dac2c"),
    "cohere": ("30dd2dcff46a4eab", "59d345736d8b69a1", "7f7e49406024a75d"),
    "cohere2": ("2cc86d408cfe0a41", "466d7889bae209fe", "5a8619efa7ca88f2"),
    "cohere2-moe": ("b515605089a58360", "934dbe2520f7a5fb", "4f53cda18c2baa0c"),
    "cwm": ("aa7d455c2a4f54e4", "b527f52ad07c89a4", "ff7aa01890e9973a"),
    "deepseek-v2-moe": ("7a7c4021187e278e", "8e7b09f7341c4e56", "4f53cda18c2baa0c"),
    "deepseek-v3-moe": ("4ef475a13fad13b4", "ea2ac7c718a59ce2", "4f53cda18c2baa0c"),
    "dots1-moe": ("7b7183286fc47049", "2994c7373b0d952f", "4f53cda18c2baa0c"),
    "ernie4.5": ("d69b491bdad41907", "3b3ea61c717e121e", "35f8e47e81f6b7de"),
    "ernie4.5-moe": ("9362b037641a08f5", "09e23074dcdf34c4", "4f53cda18c2baa0c"),
    "exaone-moe": ("d7ebd9f540d47a30", "88db8135115e6241", "4f53cda18c2baa0c"),
    "exaone4": ("bd5d01291d4b9c10", "72b21b05899d748b", "107f304232747a33"),
    "falcon-h1": ("5227c8f21f47e747", "ba53d39f05d6519f", "fda74eacb0450be0"),
    "flex-olmo-moe": ("420e4ba9c0dec1a7", "f6901967ccc511d3", "4f53cda18c2baa0c"),
    "gemma": ("8928afcdf711d89f", "c7d81c8e727f77ff", "788902761eb1f70d"),
    "gemma2": ("27517b457ddfeea7", "5ff0ca361d2bb644", "699ee65bd9a97fee"),
    "gemma3": ("e4612489690b231e", "a822473fcffe6e09", "a79b432aca867c50"),
    "gemma3n": ("7f13a7033881558e", "383dceff52eab9e5", "65a0cd5958219088"),
    "gemma4": ("a18e709e4ff3571e", "9bdc0ffbb8b0cfc0", "43524f60a1327bef"),
    "gemma4-moe": ("e458c6dd5cc55cca", "b009389c44d35e9d", "4f53cda18c2baa0c"),
    "glm": ("2a495f40b4f5fed4", "28b4c1c382aa573e", "454dcb205b720265"),
    "glm4": ("cdca82956854cec2", "facff749fea4416b", "a80da5b3fe3b34f5"),
    "glm4-lite-moe": ("522e39a8ff9b058f", "5192b0b8feb1638a", "4f53cda18c2baa0c"),
    "glm4-moe": ("28286f4494044448", "3d90a4c04a932ab4", "4f53cda18c2baa0c"),
    "gpt-neox": ("9701a8b9bda77b90", "807dfa6f5396941e", "b5283ec86058f3bc"),
    "gpt-oss": ("d7463fde25ee4835", "cd697de4a22e1819", "4f53cda18c2baa0c"),
    "granite": ("4693efb6d98c2f28", "5dc6e1959e879a5d", "51a3788288cc4b3a"),
    "granite-moe": ("fd0dbc13d6cb192c", "1c9587ae674b10db", "4f53cda18c2baa0c"),
    "granite-shared-moe": ("f0eea6f30dbef978", "6837f66a80544893", "4f53cda18c2baa0c"),
    "granite-swa": ("890b01a9f8c0e2a5", "5323dcdafab03c31", "4f53cda18c2baa0c"),
    "granite-swa-moe": ("0cd801a994b9def6", "a0af9645bf096368", "4f53cda18c2baa0c"),
    "granite4": ("65b869f8bb18deaa", "475a7fe0fb9a2e5d", "86182872a5bab735"),
    "granite4-h": ("fa42f20af5aaa461", "0f8d69ead2236c10", "b82b55797adcb834"),
    "granite4-h-moe": ("3f3f36fc30579610", "330e103939ee3437", "4f53cda18c2baa0c"),
    "granite4-moe": ("f0eea6f30dbef978", "6837f66a80544893", "4f53cda18c2baa0c"),
    "helium": ("8491b827f19f4db5", "59c6af9578d46519", "e4587749fd01f6ef"),
    "hunyuan": ("1efed54179ccbbf9", "9bad7de0b0d85846", "9cf04d60dadd0909"),
    "hunyuan-moe": ("6b132b9068dc0345", "9d4b771adb3af05b", "4f53cda18c2baa0c"),
    "hyperclovax": ("f1d4073dbaaa1aba", "0ba02ea072b3f18d", "68df46c20d014f54"),
    "internlm3": ("59bc3530c19a0cea", "0f68b3abdc0ae5bd", "613b7088f233f4fa"),
    "jais2": ("8bb4584dc0a2890e", "5c1873911f02931d", "9b4194473b01ae3f"),
    "lfm2": ("327dd0e8c1d901ba", "1f717f29d9519535", "21c695f1318060b7"),
    "lfm2-moe": ("e99be2931bc04383", "9b825b4f44a9e06e", "4f53cda18c2baa0c"),
    "llama": ("6517767b23d599e1", "fd928de15f6d1ce1", "b6f4acf47d8758e5"),
    "llama-tied": ("6517767b23d599e1", "e20425b86f88a9c3", "b14b5204a255ca60"),
    "llama3-rope": ("0b612295e34fe5d0", "fd928de15f6d1ce1", "b6f4acf47d8758e5"),
    "llama4-moe": ("5122c75d2a7ea2f3", "90963dd675345063", "4f53cda18c2baa0c"),
    "mellum-moe": ("48c74d86fea5a141", "84b58fed5683fe28", "4f53cda18c2baa0c"),
    "minimax-m2": ("767fdaa4f5ac12a8", "a73096a9b49ab25c", "4f53cda18c2baa0c"),
    "ministral": ("4c857ce993fecba9", "98e09603b961a489", "ff3c1bbb43580b67"),
    "ministral3": ("774d75ec5bfa026b", "416848e47da011ae", "b9556d17a32dcdf1"),
    "mistral": ("b5fd780e7f551691", "69b449938c8440fe", "d0aa3a47d990995c"),
    "mixtral": ("c5a459daab64be58", "892a26c5068418c6", "4f53cda18c2baa0c"),
    "nanochat": ("95e3a4069b62668e", "0755391cdb058978", "4c7eb2d67c828a36"),
    "nemotron": ("22681d5363c388f5", "5be64f59940cd54a", "d0834d09efe49789"),
    "nemotron-h": ("a8a8f25258d1a6e4", "ef8f684ff50a6dde", "99bdd551a6566793"),
    "nemotron-h-moe": ("45eb76b749fdf429", "1abf145478d61f3e", "4f53cda18c2baa0c"),
    "olmo": ("bb7f1738136b5040", "a120759aebff680e", "d338ed6aab9f6f1e"),
    "olmo2": ("7d9b207355aef053", "d5d55c6eb9543e7f", "168e7615813ea9d1"),
    "olmo3": ("149000de5b928580", "a6ca90cf751fa774", "d5fdefb788a62d7f"),
    "olmoe": ("8e9828e6ffe25cce", "5dd5b79e3fb5db23", "4f53cda18c2baa0c"),
    "phi": ("656c64d317c1b87e", "7600b870f44f0a83", "4f53cda18c2baa0c"),
    "phi3": ("e506635d50e86995", "8db6c42bbf074fe9", "51858076ff14a619"),
    "phi4-mini": ("693c3a7d45467413", "539070ff5d5be1aa", "0cae3cfb7691908a"),
    "phimoe": ("e923a9fab888ebd2", "ebab59e6d298ccfa", "4f53cda18c2baa0c"),
    "qwen2": ("ca1d146926906605", "103ef58181183b8e", "8f6a13bf83789394"),
    "qwen2-moe": ("56984a5984bf5b0d", "0fa23908f9367176", "4f53cda18c2baa0c"),
    "qwen3": ("a3480f5838cc2db6", "e236df87432651bb", "7b834beca3a55fd7"),
    "qwen3-moe": ("9b5ad49ebd26681f", "9a6066f1b520b33a", "4f53cda18c2baa0c"),
    "qwen3-next-moe": ("a1eb240287b08299", "b50095d6e421b341", "4f53cda18c2baa0c"),
    "qwen3.5": ("c574a611eaacdc47", "b2c4d1dc9ce58f51", "5e4ee4bca04e2925"),
    "qwen3.5-moe": ("a9aa6bf81aa11a69", "46f0866aef2a2144", "4f53cda18c2baa0c"),
    "seed-oss": ("0d6e8f67eaa82bd7", "2a9d4ef7097e1b3f", "e0590d42c09abf7e"),
    "smollm3": ("4d92117f3ee2382f", "f34c6d8e6f744cd4", "0cb158d2a453fcba"),
    "solar-open-moe": ("cdcd346c8448d0b5", "e6dc10071520e5ba", "4f53cda18c2baa0c"),
    "stablelm": ("abf92458fe326023", "fc736120f4bd6a83", "9bfbc942933a8720"),
    "starcoder2": ("319c292d62e53c6c", "35790116e8202a8f", "24335b473fb0446b"),
    "vaultgemma": ("ca723ddc5c31d0e6", "65c16e31e12f1744", "c1c8aaf75ef62cf1"),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_a_network_is_lowered_to_does_not_change(kind: str) -> None:
    architecture = architecture_for(KINDS[kind])
    spec = architecture.from_hf(KINDS[kind])
    program, params = with_short_numbers(architecture.program(spec)), architecture.params(spec)
    on_cpu, on_cuda = [], []
    for quantization in QUANTIZATIONS:
        quantized = quantized_params(program, params, replace(OPTIONS, quantization=quantization))
        lowered = cpu.lower(program, params, dtype=DType.FLOAT16, quantized=quantized)
        on_cpu.append((lowered.op_records().tobytes(), lowered.tensors, lowered.buffers, sorted(lowered.offsets)))
        if kind in REFUSED_BY_CUDA:
            continue
        for_gpu = cuda.lower(
            program, params, quantized=quantized, dtype="float16", max_seq_len=OPTIONS.max_seq_len,
            block_size=OPTIONS.tokens_per_block, tiles=tiles_for("float16"),
        )  # fmt: skip
        record = for_gpu.record
        launched = record.kernels, record.launches, record.tactics, record.scratch_bytes
        on_cuda.append((launched, list(record.tensors.values()), for_gpu.buffers, for_gpu.query_tokens))
    found = engine_digest(program, OPTIONS, {})[:16], _digest(on_cpu), _digest(on_cuda)
    assert found == DIGESTS[kind]


def _digest(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def with_short_numbers(program: Program) -> Program:
    """Powers differ in their last bit from one C library to the next."""
    ops = (replace(op, attrs={name: _short(value) for name, value in op.attrs.items()}) for op in program.ops)
    return replace(program, ops=tuple(ops))


def _short(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_short, value))
    return float(f"{value:.6g}") if isinstance(value, float) else value
