"""Repositories in object stores: S3 against moto's server; what is copied, linked, kept and thrown away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

from llmserve.errors import InternalError, InvalidArgument, ModelConfigError
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.loading.object_store import ObjectStoreRepository, open_object_store
from llmserve.serving.settings import ControlMode
from tests.serving.models import BACKENDS
from tests.serving.test_lifecycle import (
    HEAD,
    PYTHON,
    answer,
    answers,
    explicit,
    reaches,
    started,
    states,
    times,
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    made = boto3.resource("s3", endpoint_url=f"http://{endpoint}").create_bucket(Bucket="models")
    yield made
    made.objects.all().delete()
    made.delete()


def put(bucket: Any, name: str, factor: int, version: int = 1) -> None:
    bucket.put_object(Key=f"team/{name}/config.pbtxt", Body=PYTHON.encode())
    bucket.put_object(Key=f"team/{name}/{version}/model.py", Body=(HEAD + times(factor)).encode())


async def test_models_in_a_bucket_are_loaded_on_request(bucket: Any, endpoint: str) -> None:
    put(bucket, "m", 2)
    async with explicit(f"s3://{endpoint}/models/team", load=("m",)) as core:
        assert await answer(core) == 2
        served = core.model_config("m")
        await core.load_model("m")
        assert core.model_config("m") is served
        put(bucket, "m", 3)
        put(bucket, "n", 7)
        await core.load_model("m")
        assert await answer(core) == 3
        await core.load_model("n")
        assert await answer(core, "n") == 7
        with pytest.raises(InternalError, match="failed to load 'o', failed to poll from model repository"):
            await core.load_model("o")


async def test_a_bucket_is_polled(bucket: Any, endpoint: str) -> None:
    put(bucket, "m", 2)
    settings = ServerSettings(
        (f"s3://http://{endpoint}/models/team/",), control_mode=ControlMode.POLL, poll_s=0.05, strict_readiness=True
    )
    async with started(settings) as core:
        assert await answer(core) == 2
        put(bucket, "m", 9, version=2)
        await answers(core, 9)
        assert states(core)["m:2"] == ("READY", "")


GATED = """
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        record = Path(args["model_repository"], args["model_version"], "gate.jsonl")
        if not record.exists():
            raise ValueError("it has no record")
        self.num_lines = len(record.read_text().splitlines())

    def execute(self, requests):
        y = [r.inputs()[0].as_numpy() * self.num_lines for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", each)]) for each in y]
"""


async def test_a_record_beside_a_polled_engine_arrives_and_loads_nothing_again(bucket: Any, endpoint: str) -> None:
    """The model answers with the number of records that it has read when it was loaded, and wants one."""

    def put_file(name: str, content: str) -> None:
        bucket.put_object(Key=f"team/m/1/{name}", Body=content.encode())

    async def polled(core: InferenceCore) -> None:
        """A poll has begun after this call, and the one after it has ended what that has found."""
        for name in ("n", "o"):
            put(bucket, name, 7)
            await reaches(core, f"{name}:1", ("READY", ""))

    bucket.put_object(Key="team/m/config.pbtxt", Body=PYTHON.encode())
    put_file("model.py", HEAD + GATED)
    put_file("manifest.json", "{}")
    settings = ServerSettings((f"s3://{endpoint}/models/team",), control_mode=ControlMode.POLL, poll_s=0.05)
    async with started(settings) as core:
        assert "it has no record" in states(core)["m:1"][1]
        put_file("gate.jsonl", "passed\n")
        await reaches(core, "m:1", ("READY", ""))
        assert await answer(core) == 1
        served = core.model_config("m")
        put_file("gate.jsonl", "passed\npassed again\n")
        put_file("build_time.json", "{}")
        await polled(core)
        assert core.model_config("m") is served
        assert await answer(core) == 1
        put_file("weights", "better")
        await answers(core, 2)


async def test_a_bucket_that_is_not_there(bucket: Any, endpoint: str) -> None:
    location = f"s3://{endpoint}/no-such-bucket/team"
    with pytest.raises(ModelConfigError, match=f"{location} cannot be read"):
        await InferenceCore(ServerSettings((location,)), BACKENDS).start()


@pytest.fixture
def repository() -> Iterator[ObjectStoreRepository]:
    files = fsspec.filesystem("memory")
    files.pipe({"/r/m/config.pbtxt": b"a", "/r/m/1/weights.bin": b"w" * 100, "/r/n/config.pbtxt": b"n"})
    made = ObjectStoreRepository("memory://r", files, "r")
    yield made
    made.close()
    files.rm("/r", recursive=True)


def test_what_has_not_changed_is_linked(repository: ObjectStoreRepository) -> None:
    assert sorted(repository.list_names(cached=False)) == ["m", "n"]
    assert sorted(repository.list_names(cached=True)) == ["m", "n"]
    first = repository.fetch("m")
    assert (first.name, (first / "1/weights.bin").read_bytes()) == ("m", b"w" * 100)
    assert repository.fetch("m") == first
    fsspec.filesystem("memory").pipe("/r/m/config.pbtxt", b"bb")
    second = repository.fetch("m")
    assert second != first
    assert ((first / "config.pbtxt").read_bytes(), (second / "config.pbtxt").read_bytes()) == (b"a", b"bb")
    assert os.path.samefile(first / "1/weights.bin", second / "1/weights.bin")


def test_sidecars_of_an_engine_are_replaced_where_they_are(repository: ObjectStoreRepository) -> None:
    files = fsspec.filesystem("memory")
    files.pipe({"/r/m/1/manifest.json": b"{}", "/r/m/1/gate.jsonl": b"one"})
    first = repository.fetch("m")
    files.pipe("/r/m/config.pbtxt", b"bb")
    second = repository.fetch("m")
    files.pipe({"/r/m/1/gate.jsonl": b"one\ntwo", "/r/m/1/build_time.json": b"{}"})
    assert repository.fetch("m") == second
    assert [(each / "1/gate.jsonl").read_bytes() for each in (first, second)] == [b"one", b"one\ntwo"]
    assert {file.name for file in (second / "1").iterdir()} == {
        "build_time.json", "gate.jsonl", "manifest.json", "weights.bin",
    }  # fmt: skip
    files.rm("/r/m/1/gate.jsonl")
    assert repository.fetch("m") == second
    assert not (second / "1/gate.jsonl").exists()
    assert (first / "1/gate.jsonl").exists()
    files.pipe("/r/m/gate.jsonl", b"beside no engine")
    assert repository.fetch("m") != second


def test_sidecars_that_do_not_arrive_are_fetched_again(
    repository: ObjectStoreRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/r/m/1/manifest.json", b"{}")
    first = repository.fetch("m")
    files.pipe("/r/m/1/gate.jsonl", b"one")

    def lost(source: str, target: str) -> None:
        raise TimeoutError(source)

    with monkeypatch.context() as patch:
        patch.setattr(files, "get_file", lost)
        with pytest.raises(OSError, match=r"gate\.jsonl"):
            repository.fetch("m")
    assert repository.fetch("m") == first
    assert (first / "1/gate.jsonl").read_bytes() == b"one"


def test_copies_that_nothing_uses_are_thrown_away(repository: ObjectStoreRepository) -> None:
    first = repository.fetch("m")
    repository.discard("m", first)
    assert repository.fetch("m") == first  # the newest one stays for the next load
    fsspec.filesystem("memory").pipe("/r/m/config.pbtxt", b"bb")
    second = repository.fetch("m")
    repository.discard("m", first)
    assert not first.exists()
    repository.discard("m", second)
    fsspec.filesystem("memory").pipe("/r/m/config.pbtxt", b"ccc")
    third = repository.fetch("m")
    assert (second.exists(), (third / "1/weights.bin").read_bytes()) == (False, b"w" * 100)
    repository.close()
    assert not third.exists()


def test_names_that_lead_out_of_the_model(repository: ObjectStoreRepository, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"r/m/../../evil": {"size": 1}}
    monkeypatch.setattr(fsspec.filesystem("memory"), "find", lambda path, detail: found)
    with pytest.raises(OSError, match="leads out of its model"):
        repository.fetch("m")


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("ftp://a/b", "known URLs are s3://, gs://, as://, oss://"),
        ("s3://", "names no bucket"),
        ("s3://localhost:9000/", "names no bucket"),
        ("oss://bucket/models", "pip install 'llmserve\\[oss\\]'"),
    ],
)
def test_urls_that_cannot_be_used(location: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        open_object_store(location)
