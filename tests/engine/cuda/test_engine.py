"""CUDA engines over the interpreted kernels: logits, the law of determinism, tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmserve.builder.quantization import quantized_params
from llmserve.builder.reference import ReferenceModel, Run
from llmserve.builder.selftest import ROUNDING_CHANGES_ACCEPTED
from llmserve.core import SamplingParams
from llmserve.engine.base import PendingStep
from llmserve.engine.cuda.inputs import BUCKET_ROWS, bucket_of, buckets
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.scheduler.plan import UNSEEN, Chunk, SampleRequest, StepPlan
from tests.engine.cpu.conftest import NETWORKS
from tests.engine.cpu.law import run_randomly
from tests.engine.cpu.networks import LIMITS, Network, all_logits, odd_network, random_ids, table_network
from tests.engine.cuda.engines import compile_engine, open_runner
from tests.oracle import relative_error

OPTIONS = dataclasses.replace(LIMITS, target="cuda", given={"gpu": "sm_90"})
MADE: dict[str, Callable[[], Network]] = {**NETWORKS, "shallow": partial(odd_network, alibi=True, layers=1)}
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # as for the CPU's engines


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CudaRunner]:
    """Of the network, dtype and quantization that the test is called with."""
    network, dtype, *quantization = request.param
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization="".join(quantization))
    opened = open_runner(compile_engine(MADE[network](), tmp_path / "e.engine", options))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "runner",
    [("rope", "float16"), ("alibi", "float32"), ("peculiar", "float32"), ("rope", "bfloat16")],
    indirect=True,
    ids=str,
)
def test_logits_are_those_of_the_reference(runner: CudaRunner, request: pytest.FixtureRequest) -> None:
    """Twenty tokens: two segments of attention, and windows that end within them."""
    network, dtype = request.node.callspec.params["runner"]
    ids = random_ids(runner.info.vocab_size, 20)
    wanted = NETWORKS[network]().reference(dataclasses.replace(LIMITS, dtype=dtype)).logits(ids)
    assert relative_error(all_logits(runner, ids), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("network", "dtype", "quantization"),
    [("rope", "float32", "int8"), ("peculiar", "float16", "int8"), ("rope", "float32", "int4")],
)
def test_integers_are_those_of_the_reference(network: str, dtype: str, quantization: str, tmp_path: Path) -> None:
    """In float32 to the last bits. Others tip some activations over to the next integer, which grows from layer to
    layer: by no more than a self-test accepts."""
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization)
    made = NETWORKS[network]()
    runner = open_runner(compile_engine(made, tmp_path / "e.engine", options))
    ids = random_ids(runner.info.vocab_size, 20)
    quantized = quantized_params(made.program, made.params, options)
    reference = ReferenceModel(made.program, partial(made.load, dtype=dtype), quantized=quantized)
    wanted, exact = reference.logits_of([Run(ids), Run(ids, rounds=False)])
    accepted = 0.0 if dtype == "float32" else ROUNDING_CHANGES_ACCEPTED * relative_error(exact, wanted)
    assert relative_error(all_logits(runner, ids), wanted) < TOLERANCE[dtype] + accepted
    assert accepted < 0.1


@pytest.mark.parametrize(
    "runner",
    [("peculiar", "float16"), ("peculiar", "float16", "int8"), ("rope", "bfloat16", "int4"), ("shallow", "float16")],
    indirect=True,
    ids=str,
)
def test_logits_do_not_depend_on_who_else_is_in_the_step(runner: CudaRunner) -> None:
    """In pieces, over blocks strewn about the pool, beside another sequence: to the bit."""
    prompts = [random_ids(83, length, length) for length in (21, 6)]
    alone = [all_logits(runner, ids) for ids in prompts]
    for found, wanted in zip(run_randomly(runner, prompts, random.Random(4)), alone, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", ""), ("float16", "int8"), ("float16", "int4")])
def test_many_rows_and_few_add_up_in_the_same_order(dtype: str, quantization: str, tmp_path: Path) -> None:
    """Beyond SPLIT_ROWS other kernels run, which do in one program what several did."""
    options = dataclasses.replace(OPTIONS, dtype=dtype, quantization=quantization)
    runner = open_runner(compile_engine(odd_network(layers=1), tmp_path / "e.engine", options))
    few, many = ([launch for launch in runner.header.launches if launch.least_rows <= rows <= launch.most_rows]
                 for rows in (64, 65))  # fmt: skip
    assert {launch.kernel for launch in few} != {launch.kernel for launch in many}
    ids = random_ids(83, 70)
    together = all_logits(runner, ids)
    blocks = list(range(18))
    first = runner.step(StepPlan((Chunk(0, ids[:60], 0, blocks),)))
    assert first.tokens == []
    rest = runner.step(StepPlan((Chunk(0, ids[60:], 60, blocks, return_logits=True),)))
    assert_same_bits(rest.logits[0], together[60:])


def test_tokens_are_chosen_as_on_the_cpu(tmp_path: Path) -> None:
    """Greedy, by chance, with penalties, bans and bias, and what they are worth: the library's own choices."""
    table = np.random.default_rng(3).standard_normal((40, 40)).astype(np.float32)
    network = table_network(table)
    cpu = open_cpu(network.compile(tmp_path / "cpu.engine", LIMITS))
    cuda = open_runner(compile_engine(network, tmp_path / "cuda.engine", OPTIONS))
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=7),
        SamplingParams(temperature=1.4, top_k=9, top_p=0.8, min_p=0.05, seed=8, repetition_penalty=1.3),
    ]
    chunks = tuple(
        Chunk(
            i, [token, 5], 0, [i], targets=(5,), num_top=2,
            sample=SampleRequest(each, 0, 2, [token, 5], 1, ((4, 1.5),), (6,), lambda: b"\xfe" * 8, True, 3),
        )
        for i, (each, token) in enumerate((each, token) for each in params for token in (1, 17))
    )  # fmt: skip
    wanted, found = (runner.step(StepPlan(chunks)) for runner in (cpu, cuda))
    assert found.tokens == wanted.tokens
    assert found.log_probs == wanted.log_probs
    assert found.scores == wanted.scores


def test_a_step_can_begin_before_the_last_ones_tokens_are_known(tmp_path: Path) -> None:
    """Chosen on the device, where the next step reads them, or by the library; new sequences and ended ones between."""
    table = np.random.default_rng(5).standard_normal((40, 40)).astype(np.float32)
    runner = open_runner(compile_engine(table_network(table), tmp_path / "e.engine", OPTIONS))
    params = [SamplingParams(), SamplingParams(temperature=0.9, seed=7), SamplingParams(temperature=0.0)]

    def chunk(sequence: int, ids: list[int]) -> Chunk:
        request = SampleRequest(params[sequence], 0, len(ids), log_prob=sequence == 2)
        return Chunk(sequence, ids[-1:], len(ids) - 1, [sequence], sample=request)

    answers: list[list[int]] = [[3], [4], [5]]
    steps = ([0, 1], [1, 0, 2], [2, 1], [0, 2, 1])
    pending = None
    for members in steps:
        expecting = [[*answers[i], UNSEEN] if pending and i in pending[0] else answers[i] for i in members]
        begun = runner.launch(StepPlan(tuple(map(chunk, members, expecting))))
        if pending:
            end(answers, *pending)
        pending = members, begun
    assert pending is not None
    end(answers, *pending)
    alone = [[3], [4], [5]]
    for _ in range(4):
        for i, ids in enumerate(alone):
            ids += runner.step(StepPlan((chunk(i, ids),))).tokens
    assert [ids[: len(found)] for ids, found in zip(alone, answers, strict=True)] == answers
    assert [len(found) for found in answers] == [4, 5, 4]


def end(answers: list[list[int]], members: list[int], begun: PendingStep) -> None:
    for i, token in zip(members, begun.result().tokens, strict=True):
        answers[i].append(token)


def assert_same_bits(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def open_cpu(path: Path):  # type: ignore[no-untyped-def]
    from llmserve.engine.cpu.runner import CpuRunner

    return CpuRunner.open(path, num_blocks=16, threads=1)


@pytest.mark.parametrize("most", [1, 6, 64, 200, 1024, 2048])
def test_a_step_is_filled_up_to_a_bucket_that_has_a_graph(most: int) -> None:
    known = buckets(most)
    assert known == sorted(set(known))
    for num_rows in range(1, most + 1):
        bucket = bucket_of(num_rows, most)
        assert bucket in known
        assert 0 <= bucket - num_rows < min(num_rows, BUCKET_ROWS)
