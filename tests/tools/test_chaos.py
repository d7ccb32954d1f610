"""`make chaos`: its plan, its checks, its proxy and its clock."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tools.chaos.clock import Clock
from tools.chaos.plan import CALM_S, FAULTS, MOST_KILLS, Fault, make_plan
from tools.chaos.proxy import Proxy, closed
from tools.chaos.report import report
from tools.chaos.verdict import ENGINE_ENDED, Asked, AtRest, judge, recovery_s, wrong
from tools.soak.asking import StreamedAnswer

REST = AtRest(rss_bytes=100 << 20, used_blocks=0, num_active=0)
WHOLE = Asked("http_whole", "a story", 12.0, 12.5, StreamedAnswer("a story", (0.5,)))
CUT = Fault("cut_network", 10.0)


def answered(text: str, error: str = "") -> Asked:
    return replace(WHOLE, answer=StreamedAnswer(text, (), error))


def failed(asked: list[Asked], after: AtRest = REST) -> list[str]:
    return [check.what for check in judge([CUT], asked, REST, after) if not check.holds]


def test_a_plan_is_its_seeds() -> None:
    assert make_plan(3, 600) == make_plan(3, 600) != make_plan(4, 600)
    assert make_plan(3, 5) == []


@pytest.mark.parametrize("seed", range(20))
def test_faults_come_one_after_the_other_and_every_kind_comes(seed: int) -> None:
    plan = make_plan(seed, 600)
    counts = Counter(fault.kind for fault in plan)
    assert set(counts) == set(FAULTS)
    assert counts["kill_engine"] <= MOST_KILLS
    for fault, later in itertools.pairwise(plan):
        assert later.begin_s >= fault.begin_s + fault.lasts_s + CALM_S
    assert plan[-1].begin_s + plan[-1].lasts_s + CALM_S <= 600


@pytest.mark.parametrize(
    "right",
    [
        WHOLE,
        answered("", "Unavailable: the connection was lost"),
        answered("a st", "RemoteProtocolError: peer closed connection"),
        answered("a st", f"LlmserveError: in ensemble 'ensemble', {ENGINE_ENDED} (signal 9, SIGKILL)"),
        answered("a st", f"Unfinished: in the stream: {ENGINE_ENDED}"),
    ],
)
def test_whole_answers_and_clear_errors_are_right(right: Asked) -> None:
    assert wrong(right) == ""


@pytest.mark.parametrize(
    "bad",
    [
        answered("a tale"),
        answered("a st"),
        answered("a ta", "Unavailable: the connection was lost"),
        answered("a storya story", "ReadError: "),
        answered("a st", "Unfinished: the stream's end has the finish reason ''"),
        answered("", "HTTPStatusError: Server error '500 Internal Server Error'"),
        answered("", "LlmserveError: index out of range"),
        answered("", "ReadTimeout: "),
        replace(WHOLE, answer=None),
    ],
)
def test_what_no_fault_excuses(bad: Asked) -> None:
    assert wrong(bad)
    assert len(failed([WHOLE, bad])) == 1


def test_what_a_storm_may_not_leave() -> None:
    assert failed([WHOLE]) == []
    assert failed([WHOLE], replace(REST, used_blocks=1)) == ["nothing held afterwards"]
    assert failed([WHOLE], replace(REST, num_active=1)) == ["nothing held afterwards"]
    assert failed([WHOLE], replace(REST, rss_bytes=106 << 20)) == ["memory of the server's process within 5%"]
    assert failed([replace(WHOLE, begin_s=9.0)]) == ["recovers from each fault"]


def test_recovery_counts_from_the_end_of_a_fault() -> None:
    during = replace(WHOLE, begin_s=11.0, end_s=11.1)
    refused = replace(answered("", "Unavailable: "), begin_s=11.6, end_s=11.7)
    assert recovery_s(Fault("slow_network", 10.0, 1.5), [during, refused, WHOLE]) == 1.0
    page = report([CUT], [WHOLE], judge([CUT], [WHOLE], REST, REST), "make chaos", 20.0)
    assert "| cut_network | every connection is cut | 1 | 2.50 |" in page


async def test_the_proxy_delays_and_cuts() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(100):
                writer.write(piece)
        await closed(writer)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    host, port = (await proxy.start()).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    proxy.delay_s = 0.2
    began = time.monotonic()
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    assert time.monotonic() - began >= 0.4
    proxy.cut()
    assert await reader.read() == b""
    await closed(writer)
    proxy.delay_s = 0.0
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"new")
    assert await reader.readexactly(3) == b"new"
    await closed(writer)
    await proxy.close()
    server.close()
    await server.wait_closed()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_clock_of_a_program_jumps_and_its_monotonic_time_does_not(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    program = "import time\nwhile input(): print(time.time(), time.monotonic(), flush=True)"
    command = [sys.executable, "-c", program]
    pipe, environment = subprocess.PIPE, os.environ | clock.environment
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:

        def ahead_s() -> tuple[float, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("now\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        try:
            assert max(map(abs, ahead_s())) < 60
            clock.jump(3600)
            assert [round(each / 600) for each in ahead_s()] == [6, 0]
            clock.jump(0)
            assert max(map(abs, ahead_s())) < 60
        finally:
            process.kill()
