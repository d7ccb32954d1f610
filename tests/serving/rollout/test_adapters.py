"""What happens while the candidate for an adapter's name is loaded; the rest is in tests/frontends/text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import InvalidArgument, Unsupported
from llmserve.serving.rollout.rollouts import Asked, AskedAdapter
from tests.serving.rollout.test_rollouts import ALL_CANARY
from tests.serving.rollout.versioned import Versions, answers, ask, serving_versions, until, whole, write_m
from tests.serving.rollout.versioned import write_repository as write

ASKED = Asked(adapter=AskedAdapter("style", Path("new")), rules=ALL_CANARY)


@dataclass
class FakeAdapters:
    """One candidate, which is loaded when the test says so."""

    may_load: threading.Event = field(default_factory=threading.Event)
    calls: list[str] = field(default_factory=list)

    def load(self, name: str, path: Path) -> None:
        self.calls.append(f"load {name} {path}")

    def unload(self, name: str) -> None:
        self.calls.append(f"unload {name}")

    def poll(self, models: Container[str]) -> None: ...

    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        return {"style": {"digest": "0" * 64}}

    def load_candidate(self, name: str, path: Path) -> str:
        self.calls.append(f"try {name} {path}")
        assert self.may_load.wait(60)
        return "1" * 64

    def promote_candidate(self, name: str) -> None:
        self.calls.append(f"promote {name}")

    def unload_candidate(self, name: str) -> None:
        self.calls.append(f"leave {name}")


@pytest.mark.parametrize("change", ["load", "unload", "abort"])
async def test_what_ends_it_while_the_candidate_is_loaded(tmp_path: Path, change: str) -> None:
    adapters = FakeAdapters()
    async with serving_versions(write(tmp_path), Versions(adapters=adapters)) as core:
        starting = asyncio.ensure_future(core.start_rollout("m", ASKED))
        await until(lambda: adapters.calls)
        assert core.rollout("m")["state"] == "loading"
        if change == "load":
            await core.load_adapter("m", "other", "x")
            assert core.rollout("m")["state"] == "loading"
            await core.load_adapter("e", "style", "x")
        elif change == "unload":
            await core.unload_adapter("m", "style")
        else:
            core.abort_rollout("m", "")
        assert core.rollout("m")["state"] == "rolled_back"
        adapters.may_load.set()
        with pytest.raises(
            InvalidArgument, match=r"ended while its candidate was loading: (by hand|adapter .style. was reloaded)"
        ):
            await starting
        assert adapters.calls[-1] == "leave style"
        assert adapters.calls.count("leave style") == 1


async def test_a_load_of_the_model_ends_it_then_too(tmp_path: Path) -> None:
    adapters = FakeAdapters()
    async with serving_versions(write(tmp_path), Versions(adapters=adapters)) as core:
        starting = asyncio.ensure_future(core.start_rollout("m", ASKED))
        await until(lambda: adapters.calls)
        write_m(tmp_path, versions=(2,))
        await core.load_model("m")
        adapters.may_load.set()
        with pytest.raises(InvalidArgument, match="model 'm' was reloaded in the meantime, with its adapters"):
            await starting
        assert adapters.calls == ["try style new", "leave style"]
        assert core.rollout("m")["state"] == "failed"
        assert await answers(core, ask(1.0)) == whole(1.0)


async def test_a_server_that_stops_gives_it_back(tmp_path: Path) -> None:
    adapters = FakeAdapters()
    adapters.may_load.set()
    async with serving_versions(write(tmp_path), Versions(adapters=adapters)) as core:
        await core.start_rollout("m", ASKED)
        assert core.rollout("m")["decisions"][-1]["reason"] == "it is beside the adapter with digest 000000000000"
        assert await answers(core, ask(1.0)) == whole(1.0)
        assert core.rollout("m")["stable"]["requests"]["succeeded"] == 0, "it has not asked for the adapter"
    assert adapters.calls == ["try style new", "leave style"]
    async with serving_versions(write(tmp_path), Versions()) as core:
        with pytest.raises(Unsupported, match="model 'm' does not support adapters"):
            await core.start_rollout("m", ASKED)


async def test_a_model_that_is_loaded_after_a_promotion_answers(tmp_path: Path) -> None:
    adapters, versions = FakeAdapters(), Versions()
    adapters.may_load.set()
    versions.adapters, versions[2].shift = adapters, 100.0
    async with serving_versions(write(tmp_path), versions) as core:
        await core.start_rollout("m", ASKED)
        await core.promote_rollout("m")
        assert (core.rollout("m")["state"], adapters.calls[-1]) == ("promoted", "promote style")
        write_m(tmp_path, versions=(2,))
        await core.load_model("m")
        for name in ("m", "e"):
            assert await answers(core, ask(1.0, name, parameters={"lora_name": "style"})) == whole(1.0, 100.0)
