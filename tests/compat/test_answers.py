"""One set of clients, two servers.

`make test` compares llmserve with what the real Triton answered (`recorded/`); `make compat` starts the real one too,
and compares its answers with the record, so that the record is known to be true. `COMPAT_RECORD=1` writes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
from tests.compat.observe import Case

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
PAGE = Path(__file__).parents[2] / "docs/compatibility.md"


@pytest.mark.parametrize("key", CASES)
def test_llmserve(llmserve: GetServer, key: str) -> None:
    group, _, name = key.partition(": ")
    case = CASES[key]
    expected = EXPECTED[key] if key in EXPECTED else case.reduce(RECORDED[group][name])
    server = llmserve(group)
    for _ in range(case.num_tries - 1):
        if case.observe(server) == expected:
            return
    assert case.observe(server) == expected


@pytest.mark.parametrize("group", GROUPS)
def test_triton_answers_as_recorded(triton: GetServer, group: str) -> None:
    server = triton(group)
    observed = {name: case.observe(server) for name, case in GROUPS[group].items()}
    if os.environ.get("COMPAT_RECORD"):
        record.store(group, observed)
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
