"""Connections that no client would make: the corpus, and some seconds of new ones. And what counts as a finding."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from llmserve.errors import InvalidArgument
from tests.fuzz import target as fuzzing
from tests.fuzz.target import CORPUS, Finding, Target, fuzz
from tests.fuzz.wire_targets import real_server, wire_targets

SECONDS = 8  # for each
WIRES = ("http", "http2")


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    with real_server() as server:
        yield {target.name: target for target in wire_targets(server)}


@pytest.mark.parametrize("path", sorted(path for wire in WIRES for path in (CORPUS / wire).glob("*.bin")), ids=str)
def test_the_corpus(targets: dict[str, Target], path: Path) -> None:
    targets[path.parent.name].check(path.read_bytes())


@pytest.mark.parametrize("name", WIRES)
def test_new_connections(targets: dict[str, Target], name: str) -> None:
    assert fuzz(targets[name], SECONDS) > 0


def test_every_folder_of_the_corpus_has_a_target(targets: dict[str, Target]) -> None:
    from tests.fuzz.test_files import TARGETS

    assert {path.name for path in CORPUS.iterdir()} <= {*targets, *TARGETS}  # git keeps no empty folders


def refuses(data: bytes) -> None:
    raise InvalidArgument("no")


def breaks(data: bytes) -> None:
    if b"x" in data:
        raise KeyError(data)


def logs(data: bytes) -> None:
    logging.getLogger("llmserve.test").error("it broke")


def burns(data: bytes) -> None:
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass


def takes(data: bytes) -> None:
    bytearray(b"x") * (64 * 2**20)


def test_what_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "MAX_GROWTH_BYTES", 2**20)
    Target("t", st.binary(), refuses).check(b"x")
    for run, words in ((breaks, "KeyError"), (logs, "it broke"), (takes, "MiB"), (burns, "took 0.2 s")):
        if run is burns:  # touching new memory costs CPU, too
            monkeypatch.setattr(fuzzing, "MAX_CPU_S", 0.1)
        with pytest.raises(Finding, match=words):
            Target("t", st.binary(), run).check(b"x")


def test_a_finding_becomes_the_smallest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "tests/fuzz/corpus"
    monkeypatch.setattr(fuzzing, "CORPUS", corpus)
    with pytest.raises(Finding, match=r"KeyError.*the input is tests/fuzz/corpus/t/"):
        fuzz(Target("t", st.binary(max_size=9).map(b"y".__add__), breaks), 60)
    (found,) = (corpus / "t").glob("*.bin")
    assert found.read_bytes() == b"yx"
