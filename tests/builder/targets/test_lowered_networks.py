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
    "arcee": ("c6bbcd35b47aff3b", "c91341a479b9380f", "71a9c76af03baf95"),
    "baichuan1-7b": ("6e7b3a1923862566", "820f22f95f632681", "8acc2f66f1ac86f6"),
    "baichuan2-13b": ("0b6ff4295a627d2b", "aebc0930f8a7f6fe", "4f7f6ebe22af263a"),
    "baichuan2-7b": ("6e7b3a1923862566", "820f22f95f632681", "8acc2f66f1ac86f6"),
    "bamba": ("a1d84b28b36de4ff", "dd01ffa24f6287bd", "5af0fa6a2ac9bfde"),
    "cohere": ("30dd2dcff46a4eab", "59d345736d8b69a1", "1288ca56ddaada9e"),
    "cohere2": ("2cc86d408cfe0a41", "466d7889bae209fe", "4ae3fe6617f8995f"),
    "cohere2-moe": ("b515605089a58360", "934dbe2520f7a5fb", "4f53cda18c2baa0c"),
    "cwm": ("aa7d455c2a4f54e4", "b527f52ad07c89a4", "7fc09edf0de97a18"),
    "deepseek-v2-moe": ("7a7c4021187e278e", "8e7b09f7341c4e56", "4f53cda18c2baa0c"),
    "deepseek-v3-moe": ("4ef475a13fad13b4", "ea2ac7c718a59ce2", "4f53cda18c2baa0c"),
    "dots1-moe": ("7b7183286fc47049", "2994c7373b0d952f", "4f53cda18c2baa0c"),
    "ernie4.5": ("d69b491bdad41907", "3b3ea61c717e121e", "e760ef2e6516f79c"),
    "ernie4.5-moe": ("9362b037641a08f5", "09e23074dcdf34c4", "4f53cda18c2baa0c"),
    "exaone-moe": ("d7ebd9f540d47a30", "88db8135115e6241", "4f53cda18c2baa0c"),
    "exaone4": ("bd5d01291d4b9c10", "72b21b05899d748b", "18b38cda1f1187a5"),
    "falcon-h1": ("5227c8f21f47e747", "ba53d39f05d6519f", "65690b90ef84ea0b"),
    "flex-olmo-moe": ("420e4ba9c0dec1a7", "f6901967ccc511d3", "4f53cda18c2baa0c"),
    "gemma": ("8928afcdf711d89f", "c7d81c8e727f77ff", "9993dad5af86b47b"),
    "gemma2": ("27517b457ddfeea7", "5ff0ca361d2bb644", "1a838dc8c420c733"),
    "gemma3": ("e4612489690b231e", "a822473fcffe6e09", "46a749588ad03aad"),
    "gemma3n": ("7f13a7033881558e", "383dceff52eab9e5", "67a539e618312658"),
    "gemma4": ("a18e709e4ff3571e", "9bdc0ffbb8b0cfc0", "85049cbd1b37c935"),
    "gemma4-moe": ("e458c6dd5cc55cca", "b009389c44d35e9d", "4f53cda18c2baa0c"),
    "glm": ("2a495f40b4f5fed4", "28b4c1c382aa573e", "98cf38db49f43f89"),
    "glm4": ("cdca82956854cec2", "facff749fea4416b", "ca730370818363b6"),
    "glm4-lite-moe": ("522e39a8ff9b058f", "5192b0b8feb1638a", "4f53cda18c2baa0c"),
    "glm4-moe": ("28286f4494044448", "3d90a4c04a932ab4", "4f53cda18c2baa0c"),
    "gpt-neox": ("9701a8b9bda77b90", "807dfa6f5396941e", "fe9c829f4e818ce8"),
    "gpt-oss": ("d7463fde25ee4835", "cd697de4a22e1819", "4f53cda18c2baa0c"),
    "granite": ("4693efb6d98c2f28", "5dc6e1959e879a5d", "1ee1536512d92cd5"),
    "granite-moe": ("fd0dbc13d6cb192c", "1c9587ae674b10db", "4f53cda18c2baa0c"),
    "granite-shared-moe": ("f0eea6f30dbef978", "6837f66a80544893", "4f53cda18c2baa0c"),
    "granite-swa": ("890b01a9f8c0e2a5", "5323dcdafab03c31", "4f53cda18c2baa0c"),
    "granite-swa-moe": ("0cd801a994b9def6", "a0af9645bf096368", "4f53cda18c2baa0c"),
    "granite4": ("65b869f8bb18deaa", "475a7fe0fb9a2e5d", "cd7e2822f8c3400d"),
    "granite4-h": ("fa42f20af5aaa461", "0f8d69ead2236c10", "84607bf6d930f3fa"),
    "granite4-h-moe": ("3f3f36fc30579610", "330e103939ee3437", "4f53cda18c2baa0c"),
    "granite4-moe": ("f0eea6f30dbef978", "6837f66a80544893", "4f53cda18c2baa0c"),
    "helium": ("8491b827f19f4db5", "59c6af9578d46519", "7ba291d78cf607b8"),
    "hunyuan": ("1efed54179ccbbf9", "9bad7de0b0d85846", "d290cc098cec60e9"),
    "hunyuan-moe": ("6b132b9068dc0345", "9d4b771adb3af05b", "4f53cda18c2baa0c"),
    "hyperclovax": ("f1d4073dbaaa1aba", "0ba02ea072b3f18d", "4da0c74357d09a08"),
    "internlm3": ("59bc3530c19a0cea", "0f68b3abdc0ae5bd", "da9ce2faf5603a13"),
    "jais2": ("8bb4584dc0a2890e", "5c1873911f02931d", "40a41ff85d802f66"),
    "lfm2": ("327dd0e8c1d901ba", "1f717f29d9519535", "b710755b0b9849a7"),
    "lfm2-moe": ("e99be2931bc04383", "9b825b4f44a9e06e", "4f53cda18c2baa0c"),
    "llama": ("6517767b23d599e1", "fd928de15f6d1ce1", "320f7f1ad49ad427"),
    "llama-tied": ("6517767b23d599e1", "e20425b86f88a9c3", "012f70c249edd6a3"),
    "llama3-rope": ("0b612295e34fe5d0", "fd928de15f6d1ce1", "320f7f1ad49ad427"),
    "llama4-moe": ("5122c75d2a7ea2f3", "90963dd675345063", "4f53cda18c2baa0c"),
    "mellum-moe": ("48c74d86fea5a141", "84b58fed5683fe28", "4f53cda18c2baa0c"),
    "minimax-m2": ("767fdaa4f5ac12a8", "a73096a9b49ab25c", "4f53cda18c2baa0c"),
    "ministral": ("4c857ce993fecba9", "98e09603b961a489", "06b2785fe285f79d"),
    "ministral3": ("774d75ec5bfa026b", "416848e47da011ae", "96fce4bf43449af6"),
    "mistral": ("b5fd780e7f551691", "69b449938c8440fe", "6043dbff5047a96a"),
    "mixtral": ("c5a459daab64be58", "892a26c5068418c6", "4f53cda18c2baa0c"),
    "nanochat": ("95e3a4069b62668e", "0755391cdb058978", "cc283916c91a88f9"),
    "nemotron": ("22681d5363c388f5", "5be64f59940cd54a", "3b0727c26a4d4e33"),
    "nemotron-h": ("a8a8f25258d1a6e4", "ef8f684ff50a6dde", "960e13eda8284ef6"),
    "nemotron-h-moe": ("45eb76b749fdf429", "1abf145478d61f3e", "4f53cda18c2baa0c"),
    "olmo": ("bb7f1738136b5040", "a120759aebff680e", "860dc419182a2e19"),
    "olmo2": ("7d9b207355aef053", "d5d55c6eb9543e7f", "2fc2795cc816fcbb"),
    "olmo3": ("149000de5b928580", "a6ca90cf751fa774", "8f20d0fe16873129"),
    "olmoe": ("8e9828e6ffe25cce", "5dd5b79e3fb5db23", "4f53cda18c2baa0c"),
    "phi": ("656c64d317c1b87e", "7600b870f44f0a83", "4f53cda18c2baa0c"),
    "phi3": ("e506635d50e86995", "8db6c42bbf074fe9", "2a4fdae6bab69e48"),
    "phi4-mini": ("693c3a7d45467413", "539070ff5d5be1aa", "01a5036718466d93"),
    "phimoe": ("e923a9fab888ebd2", "ebab59e6d298ccfa", "4f53cda18c2baa0c"),
    "qwen2": ("ca1d146926906605", "103ef58181183b8e", "bc53e05a1696d575"),
    "qwen2-moe": ("56984a5984bf5b0d", "0fa23908f9367176", "4f53cda18c2baa0c"),
    "qwen3": ("a3480f5838cc2db6", "e236df87432651bb", "0a1c128f22bb0588"),
    "qwen3-moe": ("9b5ad49ebd26681f", "9a6066f1b520b33a", "4f53cda18c2baa0c"),
    "qwen3-next-moe": ("a1eb240287b08299", "b50095d6e421b341", "4f53cda18c2baa0c"),
    "qwen3.5": ("c574a611eaacdc47", "b2c4d1dc9ce58f51", "8010a30d626b0255"),
    "qwen3.5-moe": ("a9aa6bf81aa11a69", "46f0866aef2a2144", "4f53cda18c2baa0c"),
    "seed-oss": ("0d6e8f67eaa82bd7", "2a9d4ef7097e1b3f", "b3a7e5e146bd4571"),
    "smollm3": ("4d92117f3ee2382f", "f34c6d8e6f744cd4", "0d8e5de87a3dbe46"),
    "solar-open-moe": ("cdcd346c8448d0b5", "e6dc10071520e5ba", "4f53cda18c2baa0c"),
    "stablelm": ("abf92458fe326023", "fc736120f4bd6a83", "175c1655bfb6aa95"),
    "starcoder2": ("319c292d62e53c6c", "35790116e8202a8f", "e39fe7a6393f2fa8"),
    "vaultgemma": ("ca723ddc5c31d0e6", "65c16e31e12f1744", "4ee828d89dc500f5"),
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
