"""Rollouts in a server core: what clients see, and what becomes of candidates."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmserve.core import Tenant
from llmserve.errors import InvalidArgument, NotFound, RateLimited, ResourceExhausted, Unavailable, Unsupported
from llmserve.serving.core import InferenceCore
from llmserve.serving.rollout.rollouts import Asked
from llmserve.serving.settings import ControlMode
from llmserve.serving.types import Tensor
from tests.serving.models import identity_config, request, tensors, write_model
from tests.serving.rollout.versioned import (
    BOOM,
    Versions,
    answers,
    ask,
    ended,
    serving_versions,
    until,
    whole,
    write_m,
    write_repository,
)

QUICK: dict[str, Any] = {"requests": 5, "seconds": 0, "max_latency_ratio": None}
ALL_CANARY: dict[str, Any] = {**QUICK, "shadow": 0, "canary": [1.0], "requests": 1000}
NAMES = ("m", "e", "outer")


@pytest.fixture
def versions() -> Versions:
    return Versions()


async def clients(core: InferenceCore, number: int = 16, name: str = "e") -> list[list[float]]:
    """The answers to that many requests at the same time."""
    return await asyncio.gather(*(answers(core, ask(float(value), name)) for value in range(number)))


async def traffic(core: InferenceCore, shifts: tuple[float, ...] = (0.0,)) -> dict[str, Any]:
    """Ask all names until the rollout has ended; every answer is one version's as a whole."""
    async with asyncio.timeout(30):
        while (report := core.rollout("m"))["state"] not in ("promoted", "rolled_back", "failed"):
            for name in NAMES:
                for value, found in enumerate(await clients(core, 8, name)):
                    assert found in [whole(value, shift) for shift in shifts], (name, found)
    return report


async def test_a_good_candidate_is_promoted_and_the_old_version_goes(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1, "canary": [0.5]}))
        assert core.rollout("m")["state"] == "shadow"
        report = await traffic(core)
        assert report["state"] == "promoted"
        assert [each["what"] for each in report["decisions"]] == ["started", "next_step", "promoted"]
        assert report["agreement"]["fraction"] == 1.0
        assert report["candidate"]["shadow"]["succeeded"] >= 5
        assert report["candidate"]["canary"]["succeeded"] >= 5
        assert report["latency_ratio"]["total"] > 0
        assert report["candidate"]["shadow"]["total_ms"] > 0
        await until(lambda: versions[1].num_closed)
        assert [row.version for row in core.repository_index() if row.name == "m" and row.state == "READY"] == ["2"]
        assert await answers(core, ask(1.0, "m", model_version="2")) == whole(1.0)
        for name in NAMES:
            await clients(core, name=name)
        assert versions[2].num_closed == 0


@pytest.mark.parametrize("name", NAMES)
async def test_shares_are_of_requests_and_no_answer_mixes_versions(
    tmp_path: Path, versions: Versions, name: str
) -> None:
    versions[1].delay_s = versions[2].delay_s = 0.001
    versions[2].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "canary": [0.25]}))
        found = await clients(core, 400, name)
        assert all(one in (whole(value), whole(value, 100.0)) for value, one in enumerate(found))
        num_canary = sum(one == whole(value, 100.0) for value, one in enumerate(found))
        assert 60 <= num_canary <= 140
        assert core.rollout("m")["candidate"]["canary"]["succeeded"] == num_canary
        assert await answers(core, ask(1.0, "m", model_version="1")) == whole(1.0)


async def test_copies_do_not_touch_the_answers(tmp_path: Path, versions: Versions) -> None:
    """A candidate that is slow and wrong, of whom clients notice nothing."""
    versions[2].shift, versions[2].delay_s = 5.0, 0.02
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1}))
        found = await asyncio.wait_for(clients(core, 16), 60)
        assert found == [whole(value) for value in range(16)]
        report = await ended(core)
        assert report["state"] == "rolled_back"
        assert "answers differ" in report["decisions"][-1]["reason"]
        await until(lambda: versions[2].num_closed and not versions[2].num_running)
        assert versions[1].num_closed == 0
        assert await clients(core) == [whole(value) for value in range(16)]


def compared_or_left(core: InferenceCore) -> int:
    """Requests whose copy is over, or was never made."""
    report = core.rollout("m")
    return int(report["agreement"]["compared"] + report["candidate"]["shadow"]["not_copied"])


async def test_a_slow_copy_is_no_slow_candidate(tmp_path: Path, versions: Versions) -> None:
    """It may have waited for its original; a slow canary request has not."""
    versions[2].delay_s = 0.01
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        rules = {"shadow": 1, "canary": [1.0], "requests": 40, "seconds": 0, "max_latency_ratio": 3}
        await core.start_rollout("m", Asked(rules=rules))
        asked = 0
        while core.rollout("m")["state"] == "shadow":
            await clients(core, 8)
            asked += 8
            await until(lambda done=asked: compared_or_left(core) == done)  # else some of the next eight are canaries
        assert core.rollout("m")["latency_ratio"] == {"first_response": None, "total": None}
        report = await traffic(core)
        assert report["state"] == "rolled_back"
        assert "times as long, significantly above 3" in report["decisions"][-1]["reason"]


async def test_too_many_copies_are_not_made(tmp_path: Path, versions: Versions) -> None:
    versions[2].delay_s = 30.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1}))
        await clients(core, 50)
        assert versions[2].num_running == 16
        assert core.rollout("m")["candidate"]["shadow"]["not_copied"] == 34
        core.abort_rollout("m", "enough")
        await until(lambda: not versions[2].num_running)


async def test_answers_that_need_not_be_equal_are_counted_and_not_compared(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift, versions.comparable = 5.0, False
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1}))
        await clients(core, 10)
        await until(lambda: core.rollout("m")["agreement"]["not_comparable"] == 10)
        assert core.rollout("m")["state"] == "shadow"
        assert core.rollout("m")["agreement"]["compared"] == 0


@pytest.mark.parametrize("name", NAMES)
async def test_a_canary_request_that_fails_first_is_answered_by_the_stable_version(
    tmp_path: Path, versions: Versions, name: str
) -> None:
    versions[2].shift, versions[2].error = 5.0, BOOM
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        assert await clients(core, 30, name) == [whole(value) for value in range(30)]
        report = await ended(core)
        assert report["state"] == "rolled_back"
        assert report["candidate"]["canary"]["rescued"] >= 2
        assert "boom" in report["decisions"][-1]["reason"]


async def test_what_fails_in_the_middle_is_told_and_counted(tmp_path: Path, versions: Versions) -> None:
    versions[2].error, versions[2].fails_after = BOOM, 1
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        for _ in range(2):
            with pytest.raises(type(BOOM), match="boom"):
                await answers(core, ask(1.0))
        assert (await ended(core))["state"] == "rolled_back"
        assert await answers(core, ask(1.0)) == whole(1.0)


async def test_a_clients_mistake_is_nobodys_fault(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "max_error_rate": 0}))
        with pytest.raises(InvalidArgument, match="must not be negative"):
            await answers(core, ask(-1.0))
        with pytest.raises(InvalidArgument):
            await answers(core, request("e", Tensor("X", "INT32", np.array([1], np.int32))))
        report = core.rollout("m")
        assert (report["state"], report["error_rate"]) == ("canary", 0.0)
        core.abort_rollout("m", "")
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1, "max_error_rate": 0}))
        for name, wrong in (("e", ask(-1.0)), ("m", request("m", Tensor("X", "INT32", np.array([1], np.int32))))):
            with pytest.raises(InvalidArgument):
                await answers(core, wrong)
            assert core.rollout("m")["stable"]["requests"]["failed"] == (1 if name == "e" else 2)
        assert core.rollout("m")["candidate"]["shadow"]["failed"] == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fails_after", [0, 1])
async def test_what_a_keys_limit_refuses_is_nobodys_fault(
    tmp_path: Path, versions: Versions, name: str, fails_after: int
) -> None:
    """Nor does the stable version answer it: the limit would be twice as large while a rollout is on."""
    versions[2].error, versions[2].fails_after = RateLimited("'ann' may have 1 answer under way"), fails_after
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "max_error_rate": 0}))
        for _ in range(5):
            with pytest.raises(RateLimited, match="may have 1 answer"):
                await answers(core, ask(1.0, name))
        versions[2].error = None
        assert await answers(core, ask(1.0, name)) == whole(1.0)
        report = core.rollout("m")
        assert (report["state"], report["error_rate"]) == ("canary", 0.0)
        canary = report["candidate"]["canary"]
        assert [canary[key] for key in ("succeeded", "failed", "cancelled", "rescued")] == [1, 0, 0, 0]
        assert versions[1].num_requests == 0
        core.abort_rollout("m", "")
        versions[1].error = RateLimited("'ann' may have 1 answer under way")
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1, "max_error_rate": 0}))
        with pytest.raises(RateLimited):
            await answers(core, ask(1.0, name))
        report = core.rollout("m")
        assert set(report["stable"]["requests"].values()) == {0}
        assert report["candidate"]["shadow"]["failed"] == 0


async def test_a_candidate_that_hangs_is_not_waited_for(tmp_path: Path, versions: Versions) -> None:
    versions[2].delay_s = 3600.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "timeout_s": 0.2}))
        assert await asyncio.wait_for(clients(core), 60) == [whole(value) for value in range(16)]
        report = await ended(core)
        assert "no response within 0.2 s" in report["decisions"][-1]["reason"]
        await until(lambda: versions[2].num_closed)


async def test_whoever_waits_when_it_is_rolled_back_gets_the_stable_answer(tmp_path: Path, versions: Versions) -> None:
    versions[2].delay_s = 3600.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        waiting = asyncio.ensure_future(clients(core))
        await until(lambda: versions[2].num_running == 16)
        core.abort_rollout("m", "it hangs")
        assert await asyncio.wait_for(waiting, 60) == [whole(value) for value in range(16)]
        assert core.rollout("m")["decisions"][-1]["reason"] == "it hangs"
        await until(lambda: versions[2].num_closed)


async def test_a_candidate_that_hangs_in_the_middle_is_not_waited_for_either(
    tmp_path: Path, versions: Versions
) -> None:
    versions[2].hangs_after = 1
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "timeout_s": 0.2}))
        for _ in range(2):
            with pytest.raises(Unavailable, match="the candidate sent nothing for"):
                await answers(core, ask(1.0))
        assert (await ended(core))["state"] == "rolled_back"
        await until(lambda: versions[2].num_closed)


async def test_copies_may_take_as_long_as_their_originals(tmp_path: Path, versions: Versions) -> None:
    versions[1].delay_s = versions[2].delay_s = 0.1
    rules = {**QUICK, "shadow": 1, "timeout_s": 0.1}
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**rules, "requests": 100}))
        await clients(core, 8)
        await until(lambda: core.rollout("m")["candidate"]["shadow"]["succeeded"] == 8)
        core.abort_rollout("m", "")
        versions[2].delay_s = 3600.0
        await core.start_rollout("m", Asked(rules=rules))
        await clients(core, 8)
        report = await ended(core)
        assert report["state"] == "rolled_back"
        assert "a copied request was not answered within 1." in report["decisions"][-1]["reason"]


async def test_clients_that_leave_a_candidate_that_hangs_are_evidence(tmp_path: Path, versions: Versions) -> None:
    versions[2].delay_s = 3600.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "canary": [0.5]}))
        for patience_s, state in ((0.2, "canary"), (1.1, "rolled_back")):
            asked = (asyncio.wait_for(answers(core, ask(1.0)), patience_s) for _ in range(20))
            await asyncio.gather(*asked, return_exceptions=True)
            assert core.rollout("m")["state"] == state
        assert "its client gave up after 1.1 s" in core.rollout("m")["candidate"]["last_error"]


async def test_running_answers_are_finished_by_who_began_them(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift, versions[2].delay_s = 100.0, 0.05
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        stream = core.infer_stream(ask(1.0))
        first = await anext(stream)
        core.abort_rollout("m", "")
        rest = [response async for response in stream]
        found = [response.output("Y") for response in (first, *rest)]
        assert [tensor.data.item(0) for tensor in found if tensor is not None] == whole(1.0, 100.0)
        await until(lambda: versions[2].num_closed)


async def test_a_candidate_that_stops_working_is_rolled_back(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=QUICK))
        versions[2].works = False
        report = await ended(core)
        assert report["decisions"][-1]["reason"] == "an instance of the candidate has stopped working"
        assert core.ready()


async def test_a_candidate_that_cannot_be_loaded_changes_nothing(tmp_path: Path, versions: Versions) -> None:
    versions[1].promised_bytes = 1234
    versions[2].load_error = ResourceExhausted("no memory is left")
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        with pytest.raises(ResourceExhausted, match="no memory is left"):
            await core.start_rollout("m", Asked(rules=QUICK))
        assert versions[2].reserved_bytes == 1234
        report = core.rollout("m")
        assert report["state"] == "failed"
        assert report["decisions"][-1]["reason"] == "the candidate cannot be loaded: no memory is left"
        assert await clients(core) == [whole(value) for value in range(16)]
        assert core.ready()
        versions[2].load_error = None
        await core.start_rollout("m", Asked(rules=QUICK))
        assert core.rollout("m")["state"] == "shadow"


async def test_a_candidate_whose_ids_mean_something_else_is_refused(tmp_path: Path, versions: Versions) -> None:
    """Only what both have is compared."""
    versions[1].id_digests = {"a": "1", "b": "2"}
    versions[2].id_digests = {"a": "1", "b": "3", "c": "4"}
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        with pytest.raises(InvalidArgument, match="the candidate's b has different tokens from version 1"):
            await core.start_rollout("m", Asked(rules=QUICK))
        assert core.rollout("m")["state"] == "failed"
        await until(lambda: versions[2].num_closed)
        assert await clients(core) == [whole(value) for value in range(16)]
        versions[2].id_digests = {"a": "1", "c": "4"}
        await core.start_rollout("m", Asked(rules=QUICK))
        assert core.rollout("m")["state"] == "shadow"


async def test_a_candidate_that_an_ensemble_cannot_stand_on_is_refused(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        config = f'backend: "versioned"\n{tensors("input", X="FP32 [ 1 ]")}\n{tensors("output", Z="FP32 [ 1 ]")}'
        write_model(tmp_path, "m", config, version=2)
        with pytest.raises(InvalidArgument, match="output_map names 'Y', which is not an output of the model"):
            await core.start_rollout("m", Asked(rules=QUICK))
        assert core.rollout("m")["state"] == "failed"
        await until(lambda: versions[2].num_closed)
        assert await clients(core) == [whole(value) for value in range(16)]


async def test_parameters_make_a_candidate_of_the_same_files(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        await core.start_rollout("m", Asked(parameters={"engine": "other"}, rules=QUICK))
        assert versions[2].parameters == {"engine": "other"}
        assert core.rollout("m")["candidate_version"] == "2"
        await core.promote_rollout("m")
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)
        assert core.rollout("m")["decisions"][-1] | {"at": ""} == {"at": "", "what": "promoted", "reason": "by hand"}
        await core.start_rollout("m", Asked(parameters={"more": "x"}, rules=QUICK))
        assert versions[3].parameters == {"engine": "other", "more": "x"}
        core.abort_rollout("m", "")
        await core.load_model("m")  # nothing has changed in the repository
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)


async def test_by_hand_it_waits_for_somebody(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1, "canary": [], "promote": "by_hand"}))
        await clients(core)
        await until(lambda: core.rollout("m")["state"] == "waiting")
        assert core.rollout("m")["waits_for"] == "a manual promotion"
        await core.promote_rollout("m")
        assert core.rollout("m")["state"] == "promoted"
        with pytest.raises(InvalidArgument, match="the rollout of model 'm' has ended: promoted"):
            core.abort_rollout("m", "")


async def test_what_cannot_be_rolled_out_is_refused(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, versions=(1,))
    write_model(tmp_path, "talk", identity_config("sequence_batching { direct { } }", dims="[ 1 ]"))
    async with serving_versions(tmp_path, versions) as core:
        for name, error, problem in (
            ("e", Unsupported, "'e' is an ensemble; roll out the model of one of its steps"),
            ("talk", Unsupported, "keeps state between requests"),
            ("m", InvalidArgument, "version 1 of model 'm' is already served"),
            ("nothing", NotFound, "'nothing' is not found"),
        ):
            with pytest.raises(error, match=problem):
                await core.start_rollout(name, Asked(rules=QUICK))
        with pytest.raises(NotFound, match="model 'm' has no version 7 in its repository; versions: 1"):
            await core.start_rollout("m", Asked("7", rules=QUICK))
        with pytest.raises(InvalidArgument, match="unknown rule 'x'"):
            await core.start_rollout("m", Asked(parameters={"a": "b"}, rules={"x": 1}))
        with pytest.raises(NotFound, match="has had no rollout since the server was started"):
            core.rollout("m")
        await core.start_rollout("m", Asked(parameters={"a": "b"}, rules=QUICK))
        with pytest.raises(InvalidArgument, match="a rollout of model 'm' is in progress"):
            await core.start_rollout("m", Asked(parameters={"a": "b"}, rules=QUICK))


async def test_where_nothing_may_change_nothing_does(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, versions=(1,))
    async with serving_versions(tmp_path, versions, ControlMode.NONE) as core:
        with pytest.raises(Unavailable, match="--model-control-mode explicit or poll"):
            await core.start_rollout("m", Asked())
    async with serving_versions(tmp_path, versions, ControlMode.POLL) as core:
        with pytest.raises(Unavailable, match="parameters of a candidate"):
            await core.start_rollout("m", Asked(parameters={"a": "b"}))


async def test_a_load_in_between_ends_the_rollout(tmp_path: Path, versions: Versions) -> None:
    """And a load of something else in the ensemble does not."""
    versions[2].shift = versions[3].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        write_model(tmp_path, "identity", (tmp_path / "identity/config.pbtxt").read_text() + "\n# changed\n")
        await core.load_model("identity")
        assert core.rollout("m")["state"] == "canary"
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)
        write_m(tmp_path, versions=(3,))
        await core.load_model("m")
        assert core.rollout("m")["decisions"][-1]["reason"] == "another version of model 'm' was loaded in the meantime"
        assert versions[3].num_loads == 1
        await until(lambda: versions[2].num_closed and versions[1].num_closed)
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)


async def test_whoever_waits_then_is_answered_all_the_same(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift, versions[2].delay_s, versions[3].shift = 100.0, 0.2, 7.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        for change in ("identity", "m"):
            waiting = asyncio.ensure_future(clients(core, 8))
            await until(lambda: versions[2].num_running == 8)
            file = tmp_path / change / "config.pbtxt"
            if change == "m":
                write_m(tmp_path, versions=(3,))
            else:
                file.write_text(file.read_text() + "\n# changed\n")
            await core.load_model(change)
            assert await waiting == [whole(value, 100.0) for value in range(8)]
        assert await answers(core, ask(1.0)) == whole(1.0, 7.0)


async def test_who_is_rescued_is_answered_by_what_is_served_then(tmp_path: Path, versions: Versions) -> None:
    versions[2].delay_s = 3600.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        waiting = asyncio.ensure_future(clients(core, 8, "outer"))
        await until(lambda: versions[2].num_running == 8)
        file = tmp_path / "identity/config.pbtxt"
        file.write_text(file.read_text() + "\n# changed\n")
        await core.load_model("identity")
        core.abort_rollout("m", "")
        assert await asyncio.wait_for(waiting, 60) == [whole(value) for value in range(8)]


async def test_an_unload_in_between_ends_it_too(tmp_path: Path, versions: Versions) -> None:
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        await core.unload_model("m")
        assert core.rollout("m")["state"] == "rolled_back"
        await until(lambda: versions[2].num_closed and versions[1].num_closed)
        with pytest.raises(NotFound):
            await answers(core, ask(1.0))


async def test_a_request_with_the_id_of_one_that_runs_goes_where_that_is(tmp_path: Path, versions: Versions) -> None:
    """What stops a request has its id."""
    versions[1].delay_s = versions[2].delay_s = 0.02
    versions[2].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "canary": [0.5]}))
        for number in range(10):
            first, *others = await asyncio.gather(*(answers(core, ask(1.0, request_id=str(number))) for _ in range(8)))
            assert all(other == first for other in others)


async def test_an_id_says_nothing_of_where_the_request_of_another_tenant_runs(
    tmp_path: Path, versions: Versions
) -> None:
    versions[1].delay_s = versions[2].delay_s = 0.02
    versions[2].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**ALL_CANARY, "canary": [0.5]}))
        tenants = [Tenant(f"tenant-{number}") for number in range(40)]
        first = await asyncio.gather(*(answers(core, ask(1.0, request_id="1", tenant=each)) for each in tenants))
        assert {tuple(each) for each in first} == {tuple(whole(1.0)), tuple(whole(1.0, 100.0))}


async def test_sequences_stay_with_the_stable_version(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift = 100.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        assert await answers(core, ask(1.0, sequence_id=7)) == whole(1.0)
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)


async def test_labels_of_an_answer_are_those_of_who_gave_it(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, versions=(1,))
    config = tmp_path / "m/config.pbtxt"
    async with serving_versions(tmp_path, versions) as core:
        (tmp_path / "m/labels.txt").write_text("cat")
        write_m(tmp_path, versions=(2,))
        config.write_text(config.read_text().replace('"Y" data_type', '"Y" label_filename: "labels.txt" data_type'))
        await core.start_rollout("m", Asked(rules=ALL_CANARY))
        stream = core.infer_stream(ask(1.0, "m"))
        response = await anext(stream)
        core.abort_rollout("m", "")
        assert core.labels("m", response.model_version) == {"Y": ("cat",)}
        assert core.labels("m", "1") == core.labels("m") == {}
        await stream.aclose()


async def test_metrics_and_logs_tell_what_happens(
    tmp_path: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llmserve.serving.rollout")
    versions[2].shift = 5.0
    async with serving_versions(write_repository(tmp_path, versions=(1,)), versions) as core:
        assert "llmserve_rollout" not in core.metrics_text()
        write_m(tmp_path, versions=(2,))
        await core.start_rollout("m", Asked(rules={**QUICK, "shadow": 1}))
        assert 'nv_inference_request_success{model="m",version="2"} 0' in core.metrics_text()
        await clients(core, 10)
        await ended(core)
        text = core.metrics_text()
        assert 'llmserve_rollout_state{model="m",state="rolled_back",version="2"} 1' in text
        assert 'llmserve_rollout_requests_total{model="m",outcome="succeeded",role="stable",version="2"} 10' in text
        assert 'llmserve_rollout_compared_total{model="m",result="equal",version="2"} 0' in text
        assert "rollout of model 'm', version 2: started: it is beside version 1" in caplog.text
        assert "rollout of model 'm', version 2: rolled_back:" in caplog.text
        assert [report["model"] for report in core.rollouts()] == ["m"]
