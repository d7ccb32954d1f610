"""Loads against a server whose numbers are known: when requests are sent, how many at a time, what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import pytest

from llmserve.benchmark.arrivals import Bursts, Constant, Gamma
from llmserve.benchmark.http_client import parse_server
from llmserve.benchmark.load import Load, Run, run_load
from llmserve.benchmark.openai_endpoint import OpenAiEndpoint
from llmserve.benchmark.records import LoadRequest, Record
from llmserve.benchmark.summary import summarize
from tests.benchmark.scripted_server import Script, ScriptedServer, scripted_server

BUSY_MACHINE_MS = 150.0  # by which anything may come late on a machine that does other things, too


def requests() -> Iterator[LoadRequest]:
    return repeat(LoadRequest("hello", 8))


class Scripted:
    """An endpoint without a wire: answers after `latency_s`."""

    def __init__(self, latency_s: float = 0.0, *, error: str = "", is_unreachable: bool = False) -> None:
        self.latency_s, self.error, self.is_unreachable = latency_s, error, is_unreachable
        self.running = self.most = self.count = 0

    async def ask(self, request: LoadRequest, record: Record) -> None:
        self.running += 1
        self.count += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.latency_s)
        finally:
            self.running -= 1
        if self.error:
            record.fail(self.error, is_unreachable=self.is_unreachable)
        else:
            record.arrived.append(time.perf_counter())

    async def close(self) -> None: ...


async def test_a_closed_loop_has_so_many_users_and_no_more() -> None:
    endpoint = Scripted(0.005)
    run = await run_load(endpoint, requests(), Load(4, num_requests=50))
    assert (len(run.records), endpoint.most, endpoint.count) == (50, 4, 50)


async def test_an_open_loop_waits_for_nobody() -> None:
    endpoint = Scripted(0.5)
    run = await run_load(endpoint, requests(), Load(rate=100.0, arrivals=Constant(), num_requests=30))
    assert endpoint.most == 30
    dues = [record.due for record in run.records]
    assert np.diff([due for due in dues if due is not None]) == pytest.approx(0.01)
    late = [record.started - record.due for record in run.records if record.due is not None]
    assert min(late) >= 0
    assert max(late) * 1000 < BUSY_MACHINE_MS


async def test_arrivals_are_those_of_the_seed() -> None:
    async def dues(seed: int) -> list[float]:
        load = Load(rate=500.0, arrivals=Gamma(), num_requests=20, seed=seed)
        run = await run_load(Scripted(), requests(), load)
        found = [record.due or 0.0 for record in run.records]
        return [round(due - found[0], 9) for due in found]

    assert await dues(1) == await dues(1) != await dues(2)


async def test_a_client_that_is_held_up_measures_its_lateness() -> None:
    class Blocking(Scripted):
        async def ask(self, request: LoadRequest, record: Record) -> None:
            time.sleep(0.03)  # noqa: ASYNC251
            await super().ask(request, record)

    load = Load(rate=1000.0, arrivals=Bursts(5), num_requests=20)
    found = summarize(await run_load(Blocking(), requests(), load))
    assert found.lateness is not None
    assert found.lateness.high > 300
    assert "requests were sent up to" in found.bottleneck()


@pytest.mark.parametrize("rate", [None, 50.0])
async def test_a_duration_ends_what_takes_longer_than_its_grace(rate: float | None) -> None:
    endpoint = Scripted(3600)
    load = Load(None if rate else 3, rate, Constant(), duration_s=0.19, grace_s=0.1)
    run = await run_load(endpoint, requests(), load)  # not in an hour
    assert {record.is_cut for record in run.records} == {True}
    assert len(run.records) <= 10 if rate else len(run.records) == 3  # a busy machine sends fewer before the end
    assert summarize(run).cut == len(run.records)
    assert endpoint.running == 0


async def test_a_duration_waits_for_what_is_under_way() -> None:
    run = await run_load(Scripted(1.0), requests(), Load(2, duration_s=0.5))
    assert len(run.records) == 2
    assert not any(record.is_cut or record.error for record in run.records)


async def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    run = await run_load(Scripted(3600), requests(), Load(2, num_requests=4, timeout_s=0.05))
    assert summarize(run).errors == {"timeout": 4}


async def test_without_a_server_it_gives_up() -> None:
    endpoint = Scripted(error="connection refused", is_unreachable=True)
    run = await run_load(endpoint, requests(), Load(2, duration_s=60))
    assert run.was_given_up
    assert endpoint.count < 50
    refusing = await run_load(Scripted(error="HTTP 429"), requests(), Load(2, num_requests=200))
    assert (refusing.was_given_up, len(refusing.records)) == (False, 200)


async def test_an_answer_of_nothing_is_an_error() -> None:
    class Silent(Scripted):
        async def ask(self, request: LoadRequest, record: Record) -> None: ...

    assert summarize(await run_load(Silent(), requests(), Load(1, num_requests=2))).errors == {"empty answer": 2}


async def test_a_fault_of_ours_is_not_hidden() -> None:
    class Wrong(Scripted):
        async def ask(self, request: LoadRequest, record: Record) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run_load(Wrong(), requests(), Load(2, num_requests=4))


async def test_cancelling_keeps_what_has_been_answered() -> None:
    endpoint = Scripted(0.02)
    task = asyncio.create_task(run_load(endpoint, requests(), Load(1, duration_s=3600)))
    while endpoint.count < 5:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    task.cancel()
    run = await task
    assert run.was_interrupted
    assert summarize(run).answered >= 4
    assert endpoint.running == 0


def against(server: ScriptedServer, load: Load) -> Run:
    endpoint = OpenAiEndpoint(parse_server(server.url, None), "model")

    async def measured() -> Run:
        try:
            return await run_load(endpoint, requests(), load)
        finally:
            await endpoint.close()

    return asyncio.run(measured())


def test_what_is_measured_is_what_the_server_did() -> None:
    """First texts after 20, 40, ... 400 ms, then 8 pieces of two tokens in steps of 30 ms; the server's own clock says
    when they were really sent."""
    with scripted_server(lambda number: Script(0.02 * (number + 1), 0.03, 8, tokens_per_piece=2)) as server:
        found = summarize(against(server, Load(rate=25.0, arrivals=Constant(), num_requests=20)))
    assert (found.answered, found.failed, found.output_tokens) == (20, 0, 320)
    sent = [served.sent for served in server.served]
    firsts = [1000 * (served.sent[0] - served.received) for served in server.served]
    latencies = [1000 * (served.sent[-1] - served.received) for served in server.served]
    between = [1000 * (each[-1] - each[0]) / 15 for each in sent]
    gaps = [1000 * gap for each in sent for gap in np.diff(each)]
    true: dict[str, Sequence[float]] = {
        "time_to_first_token": firsts, "request_latency": latencies, "inter_token_latency": between,
        "inter_chunk_latency": gaps,
    }  # fmt: skip
    for name, values in true.items():
        measured = found.distributions[name]
        assert measured.mean == pytest.approx(np.mean(values), abs=10), name
        assert measured.percentiles[50] == pytest.approx(np.percentile(values, 50), abs=10), name
        for percent in (90, 95, 99):
            assert measured.percentiles[percent] == pytest.approx(np.percentile(values, percent), abs=40), name
    assert found.distributions["time_to_first_token"].percentiles[50] >= 210
    duration = sent[-1][-1] - server.served[0].received
    assert found.duration_s == pytest.approx(duration, abs=0.1)


def test_a_server_that_dies_in_the_middle_is_told_apart_from_one_that_was_slow() -> None:
    scripts = [Script(count=5), Script(count=5, dies=True), Script(count=5, message="broken"), Script(status=503)]
    with scripted_server(lambda number: scripts[number % 4]) as server:
        found = summarize(against(server, Load(2, num_requests=40)))
    assert found.answered == 10
    assert found.errors == {"connection lost": 10, "error in the stream": 10, "HTTP 503": 10}
