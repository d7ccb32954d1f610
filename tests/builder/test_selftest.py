from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.options import BuildOptions
from llmserve.builder.selftest import MAX_PROMPT_LENGTH, make_prompts, make_selftest
from llmserve.builder.targets.base import CompileJob
from llmserve.models.number_formats import FLOAT16, INT8_CACHE
from tests.engine.cpu.networks import odd_network, random_ids

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
    job = CompileJob(network.program, network.params, options, load, lambda name, _: read.update([name]))
    selftest, loss = make_selftest(job, cache=INT8_CACHE, passage=tuple(random_ids(83, 50)))
    assert loss is not None
    assert read == dict.fromkeys(network.arrays, 1)
    assert len(selftest.prompt_lengths) == 3
    assert selftest.tolerance > 1.5 * FLOAT16.tolerance


def test_what_rounding_costs_is_measured_beside_the_network_as_it_is() -> None:
    network, passage = odd_network(), tuple(random_ids(83, 90, seed=3))
    losses = []
    for quantization in ("int8", "int4"):
        options = replace(OPTIONS, dtype="float32", quantization=quantization, max_seq_len=96)
        job = CompileJob(network.program, network.params, options, network.arrays.__getitem__, lambda *_: None)
        selftest, loss = make_selftest(job, cache=INT8_CACHE, passage=passage)
        alone, nothing = make_selftest(job, cache=INT8_CACHE)
        assert nothing is None
        np.testing.assert_array_equal(selftest.argmax, alone.argmax)
        assert loss is not None
        assert loss.positions == len(passage)
        exact = network.reference(replace(options, quantization="")).logits(passage)
        rounded = network.reference(options).logits(passage)
        assert loss.divergence == pytest.approx(mean_divergence(exact, rounded), rel=0.1)
        assert loss.agreement == pytest.approx((exact.argmax(axis=1) == rounded.argmax(axis=1)).mean(), abs=0.05)
        losses.append(loss.divergence)
    assert 0 < 5 * losses[0] < losses[1]


def mean_divergence(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    one, other = (np.exp(logits.astype(np.float64)) for logits in (wanted, found))
    p, q = one / one.sum(axis=1, keepdims=True), other / other.sum(axis=1, keepdims=True)
    return float((p * np.log(p / q)).sum(axis=1).mean())
