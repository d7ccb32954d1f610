from __future__ import annotations

from dataclasses import replace

from llmserve.benchmark.records import Record
from llmserve.engine.directory.gate_record import GateRecord
from llmserve.evaluation.judging.gate import Verdict
from llmserve.evaluation.served.replies import ServedAnswer
from llmserve.evaluation.served.speed import Speed, compare_speed, measured
from llmserve.sealed_log import Line
from tests.gate_records import content_of

LAST = Speed("EPYC, 2 cores", 32, {"ttft": 0.01, "throughput": 1000.0})


def record(speed: Speed | None, suite: str = "docs") -> GateRecord:
    content = content_of("d" * 64, suite) | ({} if speed is None else {"speed": speed.document()})
    return GateRecord(Line(content, "seal"))


def test_ratios_say_how_many_times_worse() -> None:
    now = replace(LAST, values={"ttft": 0.013, "throughput": 500.0, "open": 2.0})
    found = compare_speed(now, [record(None), record(LAST), record(None)], "docs", {"ttft": 1.2, "open": 1.5})
    ttft, throughput, opening = found.results
    assert ttft.ratio is not None
    assert abs(ttft.ratio - 1.3) < 1e-9
    assert (throughput.ratio, opening.ratio) == (2.0, None)
    assert (ttft.verdict, throughput.verdict, opening.verdict) == (Verdict.FAIL, Verdict.PASS, Verdict.PASS)
    assert (ttft.is_judged, throughput.is_judged, opening.is_judged) == (True, False, False)
    assert ttft.reason == "first token 13 ms is 1.30 times as bad as the last 10 ms, not 1.2"
    assert "digest dddddddddddd" in found.note


def test_another_machine_is_named_and_not_compared() -> None:
    here = replace(LAST, machine="Xeon, 8 cores", values={"ttft": 9.0})
    found = compare_speed(here, [record(LAST)], "docs", {"ttft": 1.2})
    assert "another machine (EPYC, 2 cores)" in found.note
    assert not any(result.is_judged for result in found.results)
    assert "no earlier record" in compare_speed(here, [record(LAST, "other")], "docs", {}).note


def test_times_are_medians_alone_and_the_throughput_is_of_all_together() -> None:
    def reply(started: float, *arrived: float) -> ServedAnswer:
        return ServedAnswer(Record(started=started, arrived=list(arrived), completion_tokens=len(arrived)))

    alone = [reply(0, 0.1, 0.2, 0.3), reply(1, 1.3, 1.5), reply(2, 2.2, 2.3)]
    together = [reply(0, 1, 2), reply(0, 1, 4)]
    speed = measured(alone, together, memory=5, build_seconds=60.0, open_seconds=1.5)
    assert {name: round(value, 6) for name, value in speed.values.items()} == {
        "ttft": 0.2, "itl": 0.1, "throughput": 1.0, "memory": 5, "build": 60.0, "open": 1.5,
    }  # fmt: skip
    assert measured([], []).values == {}
