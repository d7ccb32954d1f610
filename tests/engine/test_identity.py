"""What a server tells of its engine, there and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.build import build_engine
from llmserve.builder.options import BuildOptions
from llmserve.engine.directory.artifact import EngineDirectory
from llmserve.engine.directory.identity import EngineIdentity, told_apart
from tests.checkpoints import make_checkpoint
from tests.gate_records import record_of


@pytest.mark.parametrize(("quantization", "precision"), [("", "float"), ("int8", "int8")])
def test_an_identity_is_read_as_it_was_told(quantization: str, precision: str, tmp_path: Path) -> None:
    options = BuildOptions(
        dtype="float32", quantization=quantization, max_num_tokens=64, max_seq_len=64, tokens_per_block=16
    )
    build_engine(make_checkpoint(tmp_path / "tiny", "llama"), tmp_path / "engine", options)
    directory = EngineDirectory.open(tmp_path / "engine")
    identity = EngineIdentity.of(directory.manifest)
    assert EngineIdentity.read(identity.parameters()) == identity
    assert (identity.digest, identity.precision) == (directory.manifest.engine_digest, precision)
    assert identity.is_deterministic
    told = identity.document([record_of("docs", passed=True)])
    assert told["gate"] == [{"suite": "docs", "passed": True, "verdict": "pass", "time": "2026-01-02T03:04:05Z"}]


def test_a_server_that_does_not_tell() -> None:
    assert EngineIdentity.read({}) is None
    assert EngineIdentity.read({"engine_digest": "d", "gpt_model_path": "engine"}) is None


def test_digests_that_differ_late_are_told_as_far_as_that() -> None:
    assert told_apart("a" * 64, "b" * 64) == ("a" * 12, "b" * 12)
    assert told_apart("a" * 20 + "b" * 44, "a" * 20 + "c" * 44) == ("a" * 20 + "b", "a" * 20 + "c")
