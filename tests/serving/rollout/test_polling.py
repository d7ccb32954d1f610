"""Versions that appear in a repository, and servers that are started again."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmserve.engine.directory.artifact import CACHE_FILE, MANIFEST_FILE
from llmserve.engine.directory.build_time import BUILD_TIME_FILE
from llmserve.engine.directory.gate_record import RECORDS_FILE
from llmserve.errors import GateClosed, InternalError
from llmserve.serving.core import InferenceCore
from llmserve.serving.loading.sidecars import MANIFEST, SIDECARS
from llmserve.serving.rollout.memory import FILE_NAME
from llmserve.serving.rollout.rollouts import Asked
from llmserve.serving.settings import ControlMode
from tests.serving.rollout.versioned import (
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

RULES = '{"shadow": 1, "canary": [1.0], "requests": 5, "seconds": 0, "max_latency_ratio": null}'
POLL: dict[str, Any] = {"mode": ControlMode.POLL, "poll_s": 0.05}


@pytest.fixture
def versions() -> Versions:
    return Versions()


def began(core: InferenceCore) -> bool:
    return any(report["model"] == "m" for report in core.rollouts())


async def clients(core: InferenceCore) -> None:
    """Until the rollout has ended; the versions' answers are the same."""
    async with asyncio.timeout(30):
        while core.rollout("m")["state"] not in ("promoted", "rolled_back", "failed"):
            await asyncio.gather(*(answers(core, ask(1.0)) for _ in range(8)))


async def some_polls() -> None:
    await asyncio.sleep(0.4)


def remembered(repository: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((repository / "m" / FILE_NAME).read_text())
    return content


async def test_a_new_version_is_rolled_out_and_not_swapped(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        await some_polls()
        assert not began(core)
        assert remembered(tmp_path) == {"stable": 1, "refused": ""}
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
        assert (versions[1].num_loads, versions[2].num_loads) == (1, 1)
        await clients(core)
        assert core.rollout("m")["state"] == "promoted"
        await until(lambda: remembered(tmp_path)["stable"] == 2)
        await some_polls()
        assert (versions[1].num_loads, versions[2].num_loads) == (1, 1)
        assert len(core.rollout("m")["decisions"]) == 3


async def test_without_rules_a_new_version_is_swapped_as_ever(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, versions=(2,))
        await until(lambda: versions[1].num_closed)
        assert not began(core)
        assert not (tmp_path / "m" / FILE_NAME).exists()
        assert [row.version for row in core.repository_index(ready=True) if row.name == "m"] == ["2"]


async def test_other_changes_of_a_model_with_rules_are_swapped_as_ever(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, extra="# changed")
        await until(lambda: versions[1].num_loads == 2)
        assert not began(core)


async def test_what_was_rolled_back_is_not_tried_again_until_its_files_change(
    tmp_path: Path, versions: Versions
) -> None:
    versions[2].shift = 100.0
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
        for _ in range(3):
            await asyncio.gather(*(answers(core, ask(1.0)) for _ in range(8)))
        assert (await ended(core))["state"] == "rolled_back"
        await some_polls()
        assert versions[2].num_loads == 1
        assert await answers(core, ask(1.0)) == whole(1.0)
        assert core.ready()
    refused = remembered(tmp_path)
    assert refused["stable"] == 1
    assert refused["refused"]

    async with serving_versions(tmp_path, versions, **POLL) as core:
        await some_polls()
        assert not began(core)
        assert versions[2].num_loads == 1
        assert await answers(core, ask(1.0)) == whole(1.0)
        versions[2].shift = 0.0
        (tmp_path / "m/2/weights").write_text("better")
        await until(lambda: began(core))
        await clients(core)
        assert core.rollout("m")["state"] == "promoted"


async def test_told_it_is_tried_again(tmp_path: Path, versions: Versions) -> None:
    versions[2].shift = 100.0
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
        core.abort_rollout("m", "not today")
        await some_polls()
        assert versions[2].num_loads == 1
        await core.start_rollout("m", Asked())
        assert versions[2].num_loads == 2
        await core.promote_rollout("m")
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)
        await some_polls()
        assert versions[1].num_loads == 1


async def test_a_candidate_that_does_not_load_is_tried_once_for_each_state_of_its_files(
    tmp_path: Path, versions: Versions
) -> None:
    versions[2].load_error = InternalError("half of it is missing")
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "failed")
        await some_polls()
        assert versions[2].num_loads == 1
        assert core.ready()
        versions[2].load_error = None
        (tmp_path / "m/2/rest").write_text("here it is")
        await until(lambda: core.rollout("m")["state"] == "shadow")


def test_sidecars_are_the_engines() -> None:
    assert {CACHE_FILE, BUILD_TIME_FILE, RECORDS_FILE} == SIDECARS
    assert MANIFEST_FILE == MANIFEST


async def test_what_is_told_of_an_engine_beside_it_is_no_change(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path)
    (tmp_path / "m/1" / MANIFEST).write_text("{}")
    async with serving_versions(tmp_path, versions, **POLL) as core:
        for name in SIDECARS:
            (tmp_path / "m/1" / name).write_text("a line")
        await some_polls()
        (tmp_path / "m/1" / RECORDS_FILE).write_text("a line\nand another")
        await some_polls()
        assert versions[1].num_loads == 1
        (tmp_path / "m/1/weights").write_text("better")
        await until(lambda: versions[1].num_loads == 2)
        (tmp_path / "m" / RECORDS_FILE).write_text("not beside an engine")
        await until(lambda: versions[1].num_loads == 3)
        assert await answers(core, ask(1.0)) == whole(1.0)


async def test_a_record_lets_in_a_candidate_that_was_refused_and_none_that_was_rolled_back(
    tmp_path: Path, versions: Versions
) -> None:
    versions[2].load_error = GateClosed("it has no record")
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        record = tmp_path / "m/2" / RECORDS_FILE
        (tmp_path / "m/2" / MANIFEST).write_text("{}")
        await until(lambda: began(core) and core.rollout("m")["state"] == "failed")
        await some_polls()
        versions[2].load_error = None
        record.write_text("passed")
        await until(lambda: core.rollout("m")["state"] == "shadow")
        num_loads = versions[2].num_loads
        record.write_text("passed\npassed again")
        await some_polls()
        assert core.rollout("m")["state"] == "shadow"
        core.abort_rollout("m", "not today")
        record.write_text("passed\npassed again\nand again")
        await some_polls()
        assert (core.rollout("m")["state"], versions[2].num_loads) == ("rolled_back", num_loads)


async def test_versions_that_the_policy_does_not_want_are_left(tmp_path: Path, versions: Versions) -> None:
    policy = "version_policy { specific { versions: [ 1, 3 ] } }"
    write_repository(tmp_path, RULES, extra=policy)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,), extra=policy)
        await some_polls()
        assert not began(core)
        assert versions[1].num_loads == 2  # a file more is a change, which is swapped as ever
        write_m(tmp_path, RULES, versions=(3,), extra=policy)
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
        await clients(core)
        assert [row.version for row in core.repository_index(ready=True) if row.name == "m"] == ["1", "3"]
        assert (versions[1].num_loads, versions[1].num_closed, versions[2].num_loads) == (2, 1, 0)
        assert await answers(core, ask(1.0, "m", model_version="1")) == whole(1.0)


async def test_files_that_change_during_a_rollout_begin_another(tmp_path: Path, versions: Versions) -> None:
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
        (tmp_path / "m/2/weights").write_text("better")
        await until(lambda: versions[2].num_loads == 2 and core.rollout("m")["state"] == "shadow")
        await clients(core)
        assert core.rollout("m")["state"] == "promoted"


async def test_a_server_that_ends_in_the_middle_serves_the_stable_version_again(
    tmp_path: Path, versions: Versions
) -> None:
    write_repository(tmp_path, RULES)
    versions[2].shift = 100.0
    async with serving_versions(tmp_path, versions, **POLL) as core:
        write_m(tmp_path, RULES, versions=(2,))
        await until(lambda: began(core) and core.rollout("m")["state"] == "shadow")
    assert versions[2].num_closed == 1
    for mode in (ControlMode.NONE, ControlMode.EXPLICIT):
        async with serving_versions(tmp_path, versions, mode) as core:
            assert await answers(core, ask(1.0)) == whole(1.0)
            assert not began(core)
    async with serving_versions(tmp_path, versions, **POLL) as core:
        assert await answers(core, ask(1.0)) == whole(1.0)
        await until(lambda: began(core))  # it begins anew
    async with serving_versions(tmp_path, versions) as core:
        await core.load_model("m")  # who asks for the newest gets it
        assert await answers(core, ask(1.0)) == whole(1.0, 100.0)
    assert remembered(tmp_path)["stable"] == 2


async def test_steps_that_wait_for_a_rollout_are_not_loaded_with_their_ensemble(
    tmp_path: Path, versions: Versions
) -> None:
    write_repository(tmp_path, RULES)
    async with serving_versions(tmp_path, versions) as core:
        write_m(tmp_path, RULES, versions=(2,))
        (tmp_path / "e/config.pbtxt").write_text((tmp_path / "e/config.pbtxt").read_text() + "\n# changed\n")
        await core.load_model("e")
        assert versions[2].num_loads == 0


async def test_what_cannot_be_written_or_read_is_said(
    tmp_path: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    write_repository(tmp_path, RULES, versions=(1, 2))
    file = tmp_path / "m" / FILE_NAME
    file.mkdir()
    async with serving_versions(tmp_path, versions, **POLL):
        await some_polls()
    assert caplog.text.count("that version 2 is the stable one cannot be stored") == 1
    shutil.rmtree(file)
    file.write_text("{")
    async with serving_versions(tmp_path, versions):
        assert f"{file} is ignored, so the newest version is served" in caplog.text
        assert versions[2].num_loads == 2
