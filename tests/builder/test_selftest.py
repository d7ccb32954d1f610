from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

from llmserve.builder.options import BuildOptions
from llmserve.builder.selftest import MAX_PROMPT_LENGTH, TOLERANCES, make_prompts, make_selftest
from tests.engine.cpu.networks import odd_network

OPTIONS = BuildOptions(max_seq_len=4096)


def test_the_longest_prompt_crosses_a_block_border_and_fits_the_sequence() -> None:
    lengths = [len(prompt) for prompt in make_prompts(5120, OPTIONS)]
    assert lengths == [1, 7, 40]
    assert max(map(len, make_prompts(5120, replace(OPTIONS, tokens_per_block=64)))) == 69
    assert max(map(len, make_prompts(5120, replace(OPTIONS, tokens_per_block=4096)))) == MAX_PROMPT_LENGTH
    assert [len(prompt) for prompt in make_prompts(5120, replace(OPTIONS, max_seq_len=5))] == [1, 5]


def test_prompts_are_spread_over_the_vocabulary_and_differ() -> None:
    prompts = make_prompts(1000, OPTIONS)
    ids = [token for prompt in prompts for token in prompt]
    assert all(0 <= token < 1000 for token in ids)
    assert len(set(ids)) > 0.9 * len(ids)
    assert prompts == make_prompts(1000, OPTIONS)


def test_every_parameter_is_read_once_for_all_prompts_and_both_roundings() -> None:
    network = odd_network()
    options = replace(OPTIONS, dtype="float16", quantization="int8", max_seq_len=96)
    read: Counter[str] = Counter()
    load = partial(network.load, dtype="float16")
    selftest = make_selftest(
        network.program, network.params, options, load, cache_dtype="int8", advance=lambda name, _: read.update([name])
    )
    assert read == dict.fromkeys(network.arrays, 1)
    assert len(selftest.prompt_lengths) == 3
    assert selftest.tolerance > 1.5 * TOLERANCES["float16"]
