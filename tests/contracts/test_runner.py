"""What every `Runner` promises of several samples in a chunk: they are those of as many steps of one token each."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.core import SamplingParams, TopTokens
from llmserve.engine.base import PipelinedRunner, Runner
from llmserve.engine.cpu.runner import CpuRunner
from llmserve.engine.fake import FAKE_RUNNER_INFO, FakeRunner
from llmserve.scheduler.plan import UNSEEN, Chunk, Constraint, SampleRequest, StepPlan
from tests.engine.cpu.networks import LIMITS, odd_network
from tests.engine.cuda.engines import compile_engine
from tests.engine.cuda.engines import open_runner as open_interpreted
from tests.engine.fake.pipelined import PipelinedFakeRunner

NUM_BLOCKS = 4  # of a sequence
MOST_TOKENS = 16  # that they hold
MOST_SEQUENCES = 3
NUM_IDS = 8
AMONG_IDS = tuple((token, 50.0) for token in range(NUM_IDS))  # a bias, so that penalties decide what is drawn
INTERPRETED = ("cuda", "cuda-windows")  # each step takes a tenth of a second; test_interpreted_runner.py has them


def open_cpu(folder: Path, dtype: str, quantization: str = "") -> Runner:
    options = dataclasses.replace(LIMITS, dtype=dtype, quantization=quantization)
    return CpuRunner.open(odd_network().compile(folder / "cpu.engine", options), num_blocks=64, threads=2)


def open_cpu_windows(folder: Path) -> Runner:
    path = odd_network(layers=2).compile(folder / "cpu.engine", LIMITS)
    return with_windows(CpuRunner.open(path, num_blocks=64, threads=2, keeps_all=False))


def open_cuda(folder: Path, *, layers: int = 1, keeps_all: bool = True) -> Runner:
    options = dataclasses.replace(LIMITS, target="cuda", given={"gpu": "sm_90"}, dtype="float16")
    path = compile_engine(odd_network(alibi=True, layers=layers), folder / "cuda.engine", options)
    return open_interpreted(path, keeps_all=keeps_all)


def with_windows(runner: Runner) -> Runner:
    assert runner.info.windowed_layers.num_tables == 1
    return runner


RUNNERS: dict[str, Callable[[Path], Runner]] = {
    "fake": lambda folder: FakeRunner(),
    "pipelined": lambda folder: PipelinedFakeRunner(FAKE_RUNNER_INFO),
    "cpu": lambda folder: open_cpu(folder, "float32"),
    "cpu-int8": lambda folder: open_cpu(folder, "float16", "int8"),
    "cpu-windows": open_cpu_windows,
    "cuda": open_cuda,
    "cuda-windows": lambda folder: with_windows(open_cuda(folder, layers=2, keeps_all=False)),
}


@pytest.fixture(scope="module", params=sorted(RUNNERS.keys() - set(INTERPRETED)))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    opened = RUNNERS[name](tmp_path_factory.mktemp(name))
    yield opened
    opened.close()


@dataclass(frozen=True)
class Case:
    """A sequence of which the last tokens are one chunk."""

    ids: Sequence[int]
    num_chunk: int
    num_samples: int
    request: SampleRequest  # without what its place decides
    num_prompt: int
    constraints: Sequence[Constraint] = ()  # of the samples; empty: anything may be drawn

    def request_at(self, position: int, num_samples: int = 1) -> SampleRequest:
        """After the first `position` tokens: nothing behind them is in it."""
        history = array("i", self.ids[:position]) if self.request.params.has_penalties else ()
        num_prompt = min(self.num_prompt, len(history))
        place: dict[str, Any] = {"position": position, "history": history, "num_prompt": num_prompt}
        if self.constraints:
            *earlier, last = self.constraints[: position - len(self.ids) + self.num_samples][-num_samples:]
            place |= {"banned": last.banned, "mask": last.mask, "earlier": earlier}
        return dataclasses.replace(self.request, num_samples=num_samples, **place)


@dataclass(frozen=True)
class Drawn:
    tokens: Sequence[int]
    log_probs: Sequence[float]
    top: Sequence[TopTokens]
    logits: bytes


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 6]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    presence_penalty=st.sampled_from([0.0, 5.0]),
    frequency_penalty=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**64 - 1),
)
REQUESTS = st.builds(
    SampleRequest,
    params=PARAMS,
    stream=st.integers(0, 2),
    position=st.just(0),
    bias=st.sampled_from([AMONG_IDS, ()]),
    log_prob=st.booleans(),
    num_top=st.sampled_from([0, 2]),
    logits=st.booleans(),
)


def mask_of(allowed: Collection[int], vocab_size: int) -> Callable[[], bytes]:
    return lambda: sum(1 << token for token in allowed).to_bytes(-(-vocab_size // 32) * 4, "little")


ALLOWED = st.frozensets(st.integers(0, NUM_IDS - 1), min_size=1)
BANNED = st.lists(st.integers(0, NUM_IDS - 1), max_size=3, unique=True)


@st.composite
def cases(draw: st.DrawFn, vocab_size: int) -> Case:
    ids = draw(st.lists(st.integers(0, NUM_IDS - 1), min_size=1, max_size=MOST_TOKENS))
    num_chunk = draw(st.integers(1, len(ids)))
    num_samples, num_prompt = draw(st.integers(0, num_chunk)), draw(st.integers(0, len(ids)))
    masked, bans = draw(st.booleans()), draw(st.booleans())
    constraints = [
        Constraint(draw(BANNED) if bans else (), mask_of(draw(ALLOWED), vocab_size) if masked else None)
        for _ in range(num_samples * (masked or bans))
    ]
    return Case(ids, num_chunk, num_samples, draw(REQUESTS), num_prompt, constraints)


def chunk_of(
    runner: Runner, sequence_id: int, ids: Sequence[int], start: int, place: int, sample: SampleRequest | None = None
) -> Chunk:
    """Sequences in other places share no block, nor do tables of one."""
    num_tables = 1 + runner.info.windowed_layers.num_tables
    begins = range(NUM_BLOCKS * num_tables * place, NUM_BLOCKS * num_tables * (place + 1), NUM_BLOCKS)
    table, *windowed = (range(begin, begin + NUM_BLOCKS) for begin in begins)
    return Chunk(sequence_id, ids, start, table, sample, windowed=windowed)


def drawn_together(runner: Runner, sequences: Sequence[Case]) -> list[Drawn]:
    """The last chunks of all in one step."""
    chunks = []
    for number, case in enumerate(sequences):
        start = len(case.ids) - case.num_chunk
        if start:
            runner.step(StepPlan((chunk_of(runner, number, case.ids[:start], 0, number),)))
        sample = case.request_at(len(case.ids), case.num_samples) if case.num_samples else None
        chunks.append(chunk_of(runner, number, case.ids[start:], start, number, sample))
    result = runner.step(StepPlan(tuple(chunks)))
    tokens, log_probs = list(result.tokens), list(result.log_probs)
    found = []
    for number, case in enumerate(sequences):
        scores, count = result.scores.get(number), case.num_samples
        top, logits = (scores.sampled_top, scores.logits) if scores else ((), None)
        found.append(Drawn(tokens[:count], log_probs[:count], list(top), b"" if logits is None else logits.tobytes()))
        del tokens[:count], log_probs[:count]
    assert (tokens, log_probs) == ([], [])
    return found


def drawn_singly(runner: Runner, case: Case) -> Drawn:
    """A step for each token from the first that is sampled on, in blocks that nothing else was written to."""
    first = len(case.ids) - case.num_samples
    if first:
        runner.step(StepPlan((chunk_of(runner, 0, case.ids[:first], 0, MOST_SEQUENCES),)))
    tokens: list[int] = []
    log_probs: list[float] = []
    top: list[TopTokens] = []
    logits: list[bytes] = []
    for position in range(first, len(case.ids)):
        ids, request = case.ids[position : position + 1], case.request_at(position + 1)
        chunk = chunk_of(runner, 0, ids, position, MOST_SEQUENCES, request)
        result = runner.step(StepPlan((chunk,)))
        tokens += result.tokens
        log_probs += result.log_probs
        top += [each for scores in result.scores.values() for each in scores.sampled_top]
        logits += [rows.tobytes() for rows in result.logits.values()]
    return Drawn(tokens, log_probs, top, b"".join(logits))


def test_samples_of_a_chunk_are_those_of_a_token_at_a_time(runner: Runner, name: str) -> None:
    """Greedy, by chance, with penalties, bias, bans, masks, log-probs, likely tokens and logits, beside others."""

    @settings(max_examples=6 if name in INTERPRETED else 60, deadline=None, derandomize=True)
    @given(sequences=st.lists(cases(runner.info.vocab_size), min_size=1, max_size=MOST_SEQUENCES))
    def check(sequences: list[Case]) -> None:
        assert drawn_together(runner, sequences) == [drawn_singly(runner, case) for case in sequences]

    check()


def test_a_step_may_have_more_samples_than_sequences(runner: Runner) -> None:
    """Three times three: the engines over networks take at most eight sequences. Each sample has fewer ids left that
    are not in its history."""
    params = SamplingParams(temperature=0.9, seed=3, presence_penalty=20.0)
    plain = SampleRequest(params, 0, 0, bias=AMONG_IDS)
    asking = dataclasses.replace(plain, log_prob=True, num_top=2, logits=True)
    for request in (plain, asking):
        ids = [*(number % 5 for number in range(MOST_TOKENS - 3)), 5, 6, 7]
        sequences = [Case(ids[number:], MOST_TOKENS - number, 3, request, 3) for number in range(MOST_SEQUENCES)]
        found = drawn_together(runner, sequences)
        assert [len(drawn.tokens) for drawn in found] == [3] * MOST_SEQUENCES
        assert found == [drawn_singly(runner, case) for case in sequences]


@pytest.mark.parametrize("asks", [False, True], ids=["token", "log_prob"])
def test_a_token_that_nobody_has_seen_is_the_last_sample(runner: Runner, asks: bool) -> None:
    if not isinstance(runner, PipelinedRunner):
        pytest.skip("it begins no step before the last one has ended")
    greedy = SampleRequest(SamplingParams(temperature=0.0), 0, 4, log_prob=asks, num_samples=3)
    begun = runner.launch(StepPlan((chunk_of(runner, 0, [5, 1, 2, 3], 0, 0, greedy),)))
    following = dataclasses.replace(greedy, position=5, num_samples=1)
    ahead = runner.launch(StepPlan((chunk_of(runner, 0, [UNSEEN], 4, 0, following),)))
    *_, last = begun.result().tokens
    [found] = ahead.result().tokens
    again = runner.step(StepPlan((chunk_of(runner, 0, [5, 1, 2, 3, last], 0, 1, following),)))
    assert list(again.tokens) == [found]
