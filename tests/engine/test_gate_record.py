"""Which records let an engine serve. The engine is real; its records are written here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmserve import sealed_log
from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.gate_record import (
    RECORDS_FILE,
    GateRule,
    GateSubject,
    gate_problems,
    latest,
    records_of,
    require_gate,
    standing,
)
from llmserve.errors import EngineFileError, GateClosed, InvalidArgument
from llmserve.sealed_log import Signer, Verifier
from tests.checkpoints import make_checkpoint
from tests.gate_records import HERE, add_gate_record
from tests.test_sealed_log import new_key


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    options = BuildOptions(dtype="float32", max_num_tokens=64, max_seq_len=64, tokens_per_block=16)
    build_engine(make_checkpoint(folder / "tiny", "llama"), folder / "engine", options)
    return folder / "engine"


@pytest.fixture
def directory(built: Path, tmp_path: Path) -> EngineDirectory:
    return EngineDirectory.open(shutil.copytree(built, tmp_path / "engine"))


def add(directory: EngineDirectory, suite: str = "docs", *, digest: str = "", **changes: Any) -> None:
    add_gate_record(directory.path, digest or directory.manifest.engine_digest, suite, **changes)


def problems(directory: EngineDirectory, *suites: str, verifier: Verifier | None = None) -> str:
    return "; ".join(gate_problems(GateSubject.engine(directory), GateRule(suites, verifier)))


def test_a_passing_record_opens_the_gate(directory: EngineDirectory) -> None:
    assert "no suite has a record for this engine" in problems(directory)
    assert "suite docs has no complete record for its digest; make one with: llmserve eval" in problems(
        directory, "docs"
    )
    add(directory)
    require_gate(directory, GateRule())
    require_gate(directory, GateRule(("docs",)))
    with pytest.raises(GateClosed, match=r"the gate refuses .*: suite chat has no complete record"):
        require_gate(directory, GateRule(("docs", "chat")))
    assert str(latest(records_of(directory))["docs"]) == f"docs: passed (2026-01-02T03:04:05Z, {HERE})"


def test_a_record_of_other_kernels_is_named_and_opens_nothing(directory: EngineDirectory) -> None:
    add(directory, kernels="abacus")
    words = f"suite docs was run with abacus, but this machine uses {HERE}, which may round differently"
    assert words in problems(directory)
    assert words in problems(directory, "docs")
    add(directory)
    add(directory, kernels="abacus", passed=False)  # and takes nothing away
    assert problems(directory) == problems(directory, "docs") == ""


def test_the_last_run_of_a_suite_counts(directory: EngineDirectory) -> None:
    add(directory)
    add(directory, passed=False)
    assert problems(directory, "docs") == "suite docs says fail (2026-01-02T03:04:05Z)"
    add(directory)
    assert problems(directory, "docs") == ""


def test_any_suite_means_none_that_failed(directory: EngineDirectory) -> None:
    add(directory)
    add(directory, "chat", passed=False)
    assert "suite chat says fail" in problems(directory)
    assert problems(directory, "docs") == ""


def test_part_of_a_suite_says_nothing(directory: EngineDirectory) -> None:
    add(directory)
    add(directory, complete=False, num_samples=3, passed=False)
    assert problems(directory, "docs") == ""
    assert "3 samples only" in str(records_of(directory)[-1])


def test_margins_that_nobody_blessed_do_not_count(directory: EngineDirectory) -> None:
    add(directory, blessed_by="")
    assert "nobody has blessed it" in problems(directory, "docs")


def test_records_of_another_engine_do_not_count(directory: EngineDirectory) -> None:
    add(directory, digest="0" * 64)
    assert "no suite has a record for this engine" in problems(directory)


def test_an_edited_record_opens_nothing(directory: EngineDirectory) -> None:
    add(directory, passed=False)
    path = directory.path / RECORDS_FILE
    path.write_text(path.read_text().replace('"passed": false', '"passed": true'))
    assert "line 1 of" in problems(directory, "docs")
    with pytest.raises(GateClosed, match="was changed"):
        require_gate(directory, GateRule())
    assert standing(directory.path, directory.manifest.engine_digest) == ()


def test_a_record_that_lacks_a_field_is_named(directory: EngineDirectory) -> None:
    sealed_log.append(directory.path / RECORDS_FILE, {"engine": {"digest": directory.manifest.engine_digest}})
    with pytest.raises(InvalidArgument, match="lacks a field"):
        records_of(directory)
    assert "lacks a field" in problems(directory)


def test_an_edited_engine_fails_whatever_its_record_says(directory: EngineDirectory) -> None:
    add(directory)
    data = bytearray(directory.engine_file.read_bytes())
    data[-1] ^= 1
    directory.engine_file.write_bytes(data)
    with pytest.raises(EngineFileError, match="was changed"):
        require_gate(directory, GateRule())


def test_only_what_a_key_signed_counts_where_one_is_asked_for(directory: EngineDirectory, tmp_path: Path) -> None:
    private, public = new_key(tmp_path)
    verifier = Verifier.load(public)
    add(directory)
    assert problems(directory, "docs", verifier=verifier) == "suite docs: it is not signed"
    add(directory, signer=Signer.load(private))
    assert problems(directory, "docs", verifier=verifier) == ""
    _, stranger = new_key(tmp_path, "stranger")
    assert "signed with the key" in problems(directory, "docs", verifier=Verifier.load(stranger))


def test_records_are_no_part_of_the_engine(directory: EngineDirectory) -> None:
    before = json.loads(directory.manifest.to_json())
    add(directory)
    again = EngineDirectory.open(directory.path)
    again.verify()
    assert json.loads(again.manifest.to_json()) == before


def test_what_is_shown_is_the_last_word_of_each_suite(directory: EngineDirectory) -> None:
    add(directory)
    add(directory, "chat")
    add(directory, passed=False)
    shown = standing(directory.path, directory.manifest.engine_digest)
    assert [(record.suite, record.passed) for record in shown] == [("chat", True), ("docs", False)]
    assert standing(directory.path, "another") == ()
