"""A tiny engine in real server processes: it is the same in all conditions, and what is not is found."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.client import Access
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.errors import InvalidArgument, Unavailable
from llmserve.evaluation.answers import Sample
from llmserve.evaluation.candidates import CandidateRun, engine_candidate, run_candidate
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.evaluation.served import check as checking
from llmserve.evaluation.served.check import Asked, Served, check_engine, check_server, server_identity
from llmserve.evaluation.served.comparison import ServedResult
from llmserve.evaluation.served.process import own_server
from llmserve.evaluation.served.run import Subject
from llmserve.stages.chat import Message
from tests.checkpoints import make_checkpoint
from tests.evaluation.served.defects import command

PLAIN = (sys.executable, "-m", "llmserve.cli.owned_server")
OPTIONS = BuildOptions(dtype="float32", max_num_tokens=128, max_seq_len=160, tokens_per_block=16)
MAX_TOKENS = 24
TEXT = "the file was opened and then it was read by nobody at all in this long sentence"
SAMPLES = [Sample(f"row-{i}", (Message("user", TEXT[: 12 + 5 * i]),), "unused") for i in range(12)]
CONDITIONS = [
    "alone", "as in this process", "prefix hits", "unary", "/v1 streamed", "/v1 unary", "/v1 log-probs",
    "seeded", "multi-byte", "drawn", "in flight", "staggered", "preempted",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    build_engine(make_checkpoint(folder / "tiny", "baichuan2-7b"), folder / "engine", OPTIONS)
    return folder / "engine"


@pytest.fixture(scope="module")
def other_engine(engine: Path) -> Path:
    build_engine(engine.parent / "tiny", engine.parent / "other", replace(OPTIONS, quantization="int8"))
    return engine.parent / "other"


@pytest.fixture(scope="module")
def asked(engine: Path) -> Asked:
    async def answers() -> CandidateRun:
        async with engine_candidate(engine, max_tokens=MAX_TOKENS, threads=1) as candidate:
            return await run_candidate(candidate, SAMPLES, concurrency=4)

    prompts = [prompt.input_ids for prompt in PromptEncoder(engine, MAX_TOKENS).encode_samples(SAMPLES)]
    return Asked(SAMPLES, asyncio.run(answers()).answers, MAX_TOKENS, prompts)


class Silent:
    def phase(self, name: str, total: int) -> Callable[[int], None]:
        return lambda count: None


def check(engine: Path, asked: Asked, plant: str = "", *, is_judged: bool = True) -> Served:
    started = command(plant) if plant else PLAIN
    directory = EngineDirectory.open(engine)
    return asyncio.run(check_engine(directory, started, asked, Silent(), threads=1, is_judged=is_judged))


def check_running(engine: Path, asked: Asked, plant: str) -> Served:
    """In one server, that runs: quicker."""

    async def through() -> Served:
        with own_server(command(plant), engine, ("--threads", "1")) as server:
            await server.ready()
            return await check_server(server.grpc, server.http, Access(), asked, Silent(), is_judged=True)

    return asyncio.run(through())


def by_name(served: Served) -> dict[str, ServedResult]:
    return {result.name: result for result in served.results}


@pytest.fixture(autouse=True)
def _no_server_is_left_behind() -> Iterator[None]:
    """Other tests of this process may have some of their own."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def test_a_good_engine_is_the_same_in_every_condition(engine: Path, asked: Asked) -> None:
    served = check(engine, asked)
    assert [result.name for result in served.results] == CONDITIONS
    assert [result.reason for result in served.results if result.verdict is not Verdict.PASS] == []
    assert all(result.is_judged for result in served.results)
    assert served.notes == ()
    results = by_name(served)
    assert results["in flight"].num_answers == len(SAMPLES)
    assert results["multi-byte"].num_answers == 4
    assert "preemptions" in results["preempted"].notes[0]  # and some there were, else it was not judged
    assert served.speed is not None
    assert served.speed.values.keys() == {"ttft", "itl", "throughput", "memory", "build", "open"}
    assert all(value > 0 for value in served.speed.values.values())


def test_kv_blocks_swapped_among_several_are_found(engine: Path, asked: Asked) -> None:
    results = by_name(check(engine, asked, "swap_blocks()"))
    assert results["alone"].verdict is Verdict.PASS
    assert results["as in this process"].verdict is Verdict.PASS
    in_company = ("prefix hits", "unary", "in flight", "staggered", "preempted", "/v1 streamed", "/v1 unary")
    for name in (*in_company, "/v1 log-probs"):
        assert results[name].verdict is Verdict.FAIL, name
    difference = results["in flight"].differences[0]
    assert difference.sample_id in {sample.id for sample in SAMPLES}
    assert difference.what in ("token ids", "log-probs")
    assert f"{difference.sample_id} ({difference.what}, position {difference.position}" in results["in flight"].reason


@pytest.mark.parametrize("only_streamed", [True, False])
def test_letters_of_several_bytes_that_are_dropped_are_found(engine: Path, asked: Asked, only_streamed: bool) -> None:
    result = by_name(check_running(engine, asked, f"drop_bytes(only_streamed={only_streamed})"))["multi-byte"]
    assert result.verdict is Verdict.FAIL
    ways = [difference.sample_id for difference in result.differences]
    kinds = ("streamed",) if only_streamed else ("streamed", "unary")
    assert ways == [f"{kind} over {protocol}" for protocol in ("gRPC", "/v1") for kind in kinds]
    assert {difference.position for difference in result.differences} == {2}


@pytest.mark.parametrize(("draws_anew", "found"), [(False, "the same"), (True, "token ids")])
def test_a_sampler_that_ignores_the_seed_is_found(engine: Path, asked: Asked, draws_anew: bool, found: str) -> None:
    served = check_running(engine, asked, f"ignore_seed(draws_anew={draws_anew})")
    failed = [result for result in served.results if result.verdict is Verdict.FAIL]
    assert [result.name for result in failed] == ["seeded", "drawn"]
    assert found in failed[0].reason


@pytest.mark.parametrize("plant", ["apply_temperature_twice()", "lose_a_penalty()"])
def test_draws_that_are_not_those_of_the_definition_are_found(engine: Path, asked: Asked, plant: str) -> None:
    served = check_running(engine, asked, plant)
    failed = [result for result in served.results if result.verdict is Verdict.FAIL]
    assert [result.name for result in failed] == ["drawn"]
    assert {difference.what for difference in failed[0].differences} == {"drawn token"}


@pytest.mark.parametrize("prompts", ["messages", "text"])
@pytest.mark.parametrize("at", [10, 60])  # pieces; the first few are a warm-up's
def test_one_log_prob_that_is_another_over_v1_is_found(engine: Path, asked: Asked, prompts: str, at: int) -> None:
    if prompts == "text":
        asked = replace(asked, samples=[Sample(f"row-{i}", TEXT[: 12 + 5 * i], "unused") for i in range(12)])
    served = check_running(engine, asked, f"change_log_prob(at={at})")
    failed = [result for result in served.results if result.verdict is Verdict.FAIL]
    assert [result.name for result in failed] == ["/v1 log-probs"]
    (difference,) = failed[0].differences
    assert difference.what == "log-probs"
    assert float(difference.actual) == pytest.approx(float(difference.expected), rel=1e-6)


def test_log_probs_over_v1_that_are_not_told_are_no_equal_ones(engine: Path, asked: Asked) -> None:
    result = by_name(check_running(engine, asked, "withhold_log_probs()"))["/v1 log-probs"]
    assert len(result.differences) == len(SAMPLES)
    assert {difference.actual for difference in result.differences} == {"the end"}


def test_what_promises_no_bits_is_reported_and_not_judged(engine: Path, asked: Asked) -> None:
    served = check(engine, asked, "swap_blocks()", is_judged=False)
    assert [result.name for result in served.results if result.is_judged] == ["multi-byte"]
    assert by_name(served)["in flight"].differences


def test_a_server_that_dies_in_the_middle(engine: Path, asked: Asked) -> None:
    with pytest.raises(Unavailable, match=r"ended unexpectedly \(exit code 9\); its output:[\s\S]*out of luck"):
        check(engine, asked, "die_after(20)")


def test_a_server_that_does_not_start(engine: Path, asked: Asked, tmp_path: Path) -> None:
    broken = shutil.copytree(engine, tmp_path / "engine")
    directory = EngineDirectory.open(broken)
    (broken / "tokenizer.model").unlink()
    with pytest.raises(Unavailable, match=r"did not start \(exit code 2\); its output:\n.*tokenizer.model is missing"):
        asyncio.run(check_engine(directory, PLAIN, asked, Silent(), threads=1, is_judged=True))


def test_a_server_of_another_engine(engine: Path, other_engine: Path, asked: Asked) -> None:
    with pytest.raises(InvalidArgument, match="serves another engine"):
        check(engine, asked, f"serve_instead({str(other_engine)!r})")


def test_an_engine_that_changes_during_the_run(engine: Path, other_engine: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(engine, tmp_path / "engine")
    subject = Subject.of(EngineDirectory.open(mine), "", Access())
    subject.require_unchanged()
    shutil.rmtree(mine)
    shutil.copytree(other_engine, mine)
    with pytest.raises(InvalidArgument, match="changed during the run"):
        subject.require_unchanged()


def test_a_running_server_says_which_engine_it_has(engine: Path, other_engine: Path, asked: Asked) -> None:
    expected = EngineDirectory.open(engine).manifest

    async def through() -> Served:
        with own_server(PLAIN, engine, ()) as server:
            await server.ready()
            identity = await server_identity(server.grpc, Access())
            assert identity is not None
            assert (identity.digest, identity.target) == (expected.engine_digest, "cpu")
            assert (identity.precision, identity.is_deterministic) == ("float", True)
            await asyncio.to_thread(mismatch, server.grpc)
            return await check_server(server.grpc, server.http, Access(), asked, Silent(), is_judged=True)

    def mismatch(url: str) -> None:
        assert Subject.of(EngineDirectory.open(engine), url, Access()).identity is not None
        with pytest.raises(InvalidArgument, match="serves another engine"):
            Subject.of(EngineDirectory.open(other_engine), url, Access())

    served = asyncio.run(through())
    of_its_own = {"as in this process", "prefix hits", "preempted"}
    assert {result.name for result in served.results} == set(CONDITIONS) - of_its_own
    assert all(result.verdict is Verdict.PASS for result in served.results)
    assert any("need the engine directory" in note for note in served.notes)


def test_a_running_server_that_goes_away(engine: Path, asked: Asked) -> None:
    async def through() -> None:
        with own_server(PLAIN, engine, ()) as server:
            await server.ready()
            checking = asyncio.create_task(check_server(server.grpc, "", Access(), asked, Silent(), is_judged=True))
            await asyncio.sleep(0.3)
            psutil.Process(server.pid).kill()
            await checking

    with pytest.raises(Unavailable, match=r"is gone|no server answers"):
        asyncio.run(through())


@pytest.mark.parametrize(("counts", "num_rounds"), [([0, 0, 2], 3), ([1], 1), ([0] * 9, checking.MOST_ROUNDS)])
async def test_a_small_cache_is_filled_until_somebody_gives_way(
    counts: list[int], num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter(counts)
    rounds: list[int] = []

    async def counted(metrics: str, names: Mapping[str, str]) -> Mapping[str, float]:
        return {"preemptions": next(told)}

    async def asked_at_once(asker: Any, questions: Sequence[Any], *_: Any) -> list[Any]:
        rounds.append(len(questions))
        return []

    monkeypatch.setattr(checking, "counters", counted)
    monkeypatch.setattr(checking, "in_flight", asked_at_once)
    found = checking.Check(Asked([], [], 8), True, lambda count: None)
    await found.preempted(None, "")  # type: ignore[arg-type]
    assert len(rounds) == num_rounds
    (result,) = found.results
    assert result.notes == (f"{counts[num_rounds - 1]} preemptions",)
