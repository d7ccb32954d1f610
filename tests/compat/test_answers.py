"""One set of clients, two servers.

`make test` compares llmserve with what the real Triton answered (`recorded/`); `make compat` starts the real one too,
and compares its answers with the record, so that the record is known to be true. `COMPAT_RECORD=1` writes it anew.
How many answers are the real server's to the byte is printed at the end (`pytest -s`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compat import record
from tests.compat.cases import (
    binary,
    clients,
    control,
    extensions,
    grpc,
    http,
    restricted,
    scheduling,
    statistics,
    streams,
)
from tests.compat.conftest import GetServer
from tests.compat.differences import DIFFERENCES, EXPECTED
from tests.compat.exchanges import Likeness, likeness, summary
from tests.compat.observe import Case
from tests.compat.record import load_exchanges
from tools.servers import Endpoint, Exchange

GROUPS: Mapping[str, Mapping[str, Case]] = {
    "http": http.CASES,
    "binary": binary.CASES,
    "grpc": grpc.CASES,
    "streams": streams.CASES,
    "scheduling": scheduling.CASES,
    "statistics": statistics.CASES,
    "extensions": extensions.CASES,
    "control": control.CASES,
    "restricted": restricted.CASES,
    "clients": clients.CASES,
}
RECORDED = {group: record.load(group) for group in GROUPS}
CASES = {f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()}
IDENTICAL_SHARE = 0.85
PAGE = Path(__file__).parents[2] / "docs/compatibility.md"


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Exchange]]:
    """What went over the wire, by case."""
    return {}


@pytest.fixture(scope="module")
def answers() -> dict[str, object]:
    """What was observed, by case."""
    return {}


@pytest.mark.parametrize("key", CASES)
def test_llmserve(llmserve: GetServer, key: str, seen: dict[str, list[Exchange]], answers: dict[str, object]) -> None:
    """Cases of a group are observed in their order, for what one does to the server another one sees."""
    group = key.partition(": ")[0]
    cases = [each for each in CASES if each.startswith(f"{group}: ")]
    for each in cases[: cases.index(key) + 1]:
        for _ in range(CASES[each].num_tries):
            if each not in answers or answers[each] != expected_of(each):
                answers[each] = CASES[each].observe(watched(llmserve(group), seen, each))
    assert answers[key] == expected_of(key)


def expected_of(key: str) -> object:
    group, _, name = key.partition(": ")
    return EXPECTED[key] if key in EXPECTED else CASES[key].reduce(RECORDED[group][name])


def watched(server: Endpoint, seen: dict[str, list[Exchange]], key: str) -> Endpoint:
    seen[key] = []
    return replace(server, exchanges=seen[key])


def test_most_answers_are_identical_and_none_is_worse(seen: dict[str, list[Exchange]]) -> None:
    recorded = {f"{group}: {name}": each for group in GROUPS for name, each in load_exchanges(group).items() if each}
    if not recorded.keys() <= seen.keys():
        pytest.skip("this is about all cases together")
    found = {key: likeness(theirs, seen[key]) for key, theirs in recorded.items()}
    print(f"\n{summary(found)}")
    worse = {key for key, how in found.items() if how is Likeness.WORSE}
    assert worse == {key for difference in DIFFERENCES if difference.later for key in difference.cases}
    assert list(found.values()).count(Likeness.IDENTICAL) >= IDENTICAL_SHARE * len(found)


@pytest.mark.parametrize("group", GROUPS)
def test_triton_answers_as_recorded(triton: GetServer, group: str) -> None:
    server = triton(group)
    seen: dict[str, list[Exchange]] = {}
    observed = {name: case.observe(watched(server, seen, name)) for name, case in GROUPS[group].items()}
    if os.environ.get("COMPAT_RECORD"):
        record.store(group, observed)
        record.store_exchanges(group, seen)
        return
    assert observed == RECORDED[group]


def test_the_record_has_these_cases_and_no_others() -> None:
    assert {group: set(RECORDED[group]) for group in GROUPS} == {group: set(cases) for group, cases in GROUPS.items()}
    assert CASES.keys() >= EXPECTED.keys()


def test_differences_are_real_and_on_the_page() -> None:
    same = [key for key, answer in EXPECTED.items() if RECORDED[key.split(": ")[0]][key.partition(": ")[2]] == answer]
    assert same == []
    page = PAGE.read_text()
    assert [difference.row() for difference in DIFFERENCES if difference.row() not in page] == []
