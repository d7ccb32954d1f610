"""Metrics of records whose numbers are known, by aiperf's definitions."""

from __future__ import annotations

import numpy as np
import pytest

from llmserve.benchmark.load import Run
from llmserve.benchmark.records import Record
from llmserve.benchmark.summary import Summary, parse_objectives, summarize
from llmserve.errors import InvalidArgument


def record(started: float, first: float, gap: float, count: int, tokens: int | None = None) -> Record:
    """An answer of `count` pieces, `gap` seconds apart, whose first comes `first` seconds after the request."""
    arrived = [started + first + gap * place for place in range(count)]
    return Record(
        started=started, arrived=arrived, completion_tokens=tokens or count, prompt_tokens=10, cached_tokens=4
    )


def summary(*records: Record, slo: tuple[str, ...] = ()) -> Summary:
    return summarize(Run(list(records), busy=0.1), parse_objectives(slo))


def test_the_numbers_of_one_answer() -> None:
    found = summary(record(5.0, 0.2, 0.05, 11)).distributions
    assert found["time_to_first_token"].mean == pytest.approx(200)
    assert found["inter_token_latency"].mean == pytest.approx(50)
    assert found["request_latency"].mean == pytest.approx(700)
    assert found["output_token_throughput_per_user"].mean == pytest.approx(20)
    assert found["inter_chunk_latency"].count == 10
    assert (found["output_sequence_length"].mean, found["input_sequence_length"].mean) == (11, 10)
    assert found["cached_prompt_tokens"].mean == 4


def test_tokens_that_come_together_count_each() -> None:
    found = summary(record(0.0, 0.1, 0.2, 3, tokens=9)).distributions
    assert found["inter_token_latency"].mean == pytest.approx(400 / 8)
    assert found["inter_chunk_latency"].mean == pytest.approx(200)


def test_drafted_tokens_are_told_where_there_are_some() -> None:
    without = summary(record(0.0, 0.5, 0.1, 3)).distributions
    assert not {"drafted_tokens", "accepted_tokens"} & without.keys()
    one, other = record(0.0, 0.5, 0.1, 3), record(0.0, 0.5, 0.1, 3)
    one.drafted_tokens, one.accepted_tokens = 9, 4
    found = summary(one, other).distributions
    assert [(found[name].mean, found[name].high) for name in ("drafted_tokens", "accepted_tokens")] == [
        (4.5, 9), (2, 4)
    ]  # fmt: skip


def test_percentiles_are_interpolated_as_numpy_does() -> None:
    firsts = [0.010 * step for step in range(1, 101)]
    found = summary(*(record(0.0, first, 0.01, 2) for first in firsts)).distributions["time_to_first_token"]
    for percent, value in found.percentiles.items():
        assert value == pytest.approx(np.percentile(firsts, percent) * 1000)
    assert found.percentiles[50] == pytest.approx(505)
    assert found.low == pytest.approx(10)
    assert found.high == pytest.approx(1000)


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_text() -> None:
    found = summary(record(100.0, 0.5, 0.1, 6), record(103.0, 0.5, 0.1, 16), Record(started=90.0, error="HTTP 500"))
    assert found.duration_s == pytest.approx(5.0)
    assert found.per_second(found.answered) == pytest.approx(0.4)
    assert found.per_second(found.output_tokens) == pytest.approx(22 / 5)
    document = found.document()
    assert document["output_token_throughput"] == pytest.approx(22 / 5)
    assert document["total_token_throughput"] == pytest.approx(42 / 5)


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    records = [
        record(0.0, 0.1, 0.01, 11),
        record(0.0, 0.3, 0.01, 11),
        record(0.0, 0.1, 0.09, 11),
        record(0.0, 0.1, 0, 1),
    ]
    failed = Record(error="HTTP 429", message="too many")
    found = summary(*records, failed, slo=("ttft:200ms", "itl:50ms"))
    assert found.good == 2  # the first, and the one without time between tokens
    assert found.document()["good_request_fraction"] == pytest.approx(2 / 5)
    assert found.document()["goodput"] == pytest.approx(2 / found.duration_s)
    assert summary(*records, slo=("e2e:0.15s",)).good == 1
    assert summary(*records).good is None


def test_errors_are_counted_by_kind_with_the_first_message() -> None:
    errors = [("HTTP 429", "slow down"), ("connection lost", ""), ("HTTP 429", "later")]
    found = summary(*(Record(error=kind, message=message) for kind, message in errors))
    assert found.errors == {"HTTP 429": 2, "connection lost": 1}
    assert found.messages["HTTP 429"] == "slow down"
    assert (found.answered, found.failed, found.duration_s, found.distributions) == (0, 3, 0.0, {})
    assert found.document()["errors"][0] == {"kind": "HTTP 429", "count": 2, "message": "slow down"}


def test_what_was_cut_is_in_nothing() -> None:
    cut = record(0.0, 5.0, 5.0, 3)
    cut.is_cut = True
    found = summary(record(0.0, 0.1, 0.1, 2), cut)
    assert (found.answered, found.cut, found.failed) == (1, 1, 0)
    assert found.duration_s == pytest.approx(0.2)


def test_without_a_count_pieces_stand_for_tokens() -> None:
    found = summary(Record(arrived=[1.0, 2.0, 3.0]))
    assert (found.output_tokens, found.is_counted, found.input_tokens) == (3, False, None)
    assert found.document()["tokens_counted_by"] == "pieces"


def test_a_client_that_was_too_slow_says_so() -> None:
    quick = [Record(due=1.0, started=1.001, arrived=[2.0]) for _ in range(100)]
    late = [Record(due=1.0, started=1.1, arrived=[2.0]) for _ in range(100)]
    assert summarize(Run(quick, [0.001] * 50, 0.3)).bottleneck() == ""
    assert "sent up to 100 ms late" in summarize(Run(late, [0.001] * 50, 0.3)).bottleneck()
    assert "read responses up to 50 ms late" in summarize(Run(quick, [0.05] * 50, 0.3)).bottleneck()
    assert "97% of a core" in summarize(Run(quick, [0.001] * 50, 0.97)).bottleneck()


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:", "ttft:200", "ttft:-5ms", "ttft:0ms", "tps:5ms", "ttft:nans", "itl:1.2.3s"]
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected ttft:200ms, itl:50ms or e2e:2s"):
        parse_objectives([text])
