"""What is found in model repositories, and how a broken model is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmserve.errors import InvalidArgument, ModelConfigError, NotFound
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.loading.repository import ModelSource, list_models, open_repository, read_model
from tests.serving.models import BACKENDS, floats, identity_config, request, serving, single, values, write_model


def scan(repository: Path) -> list[ModelSource]:
    return [read_model(name, places) for name, places in list_models([open_repository(repository)]).places.items()]


def test_models_and_versions(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "b", identity_config())
    for name in ("3", "10", "02", "x", "-1"):
        (directory / name).mkdir()
    write_model(tmp_path, "a", identity_config())
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "README.md").write_text("not a model")
    first, second = scan(tmp_path)
    assert (first.name, second.name, second.versions) == ("a", "b", (1, 3, 10))
    assert second.config.name == "b"


def test_a_models_problems_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "other"\nfoo: 1\n')
    (source,) = scan(tmp_path)
    assert list(source.problems) == [
        "config.pbtxt line 2, column 1: ModelConfig has no field 'foo'",
        "config.pbtxt says name: 'other', but the directory is 'm'; they must be equal",
        "no version: create a directory whose name is a number, such as m/1",
    ]


@pytest.mark.parametrize("name", ["a\nb", "-rf", "bell\x07", "\u2028"])
async def test_a_name_that_would_read_as_something_else_is_refused(name: str, tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    write_model(tmp_path, name, identity_config())
    async with serving(tmp_path) as core:
        assert core.model_ready("good")
        (reason,) = [row.reason for row in core.repository_index() if row.name == name]
    assert reason.startswith(
        f"model {name!r} cannot be loaded: {name!r} is not a valid model name: it must not begin with"
    )
    assert reason.isprintable()


async def test_entries_that_no_model_can_be_hide_no_other(tmp_path: Path) -> None:
    """A link that leads to itself cannot even be looked at."""
    write_model(tmp_path, "good", identity_config())
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff")
    async with serving(tmp_path) as core:
        reasons = {row.name: row.reason.partition("it cannot be read: ")[2] for row in core.repository_index()}
    assert reasons == {
        "bad\\udcff": "No such file or directory", "good": "", "loop": "Too many levels of symbolic links",
    }  # fmt: skip


def test_config_that_is_no_text(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "")
    (tmp_path / "m" / "config.pbtxt").write_bytes(b"\xff\xfe")
    (source,) = scan(tmp_path)
    assert source.problems[0].startswith("config.pbtxt cannot be read: ")


async def test_missing_repositories_are_all_named(tmp_path: Path) -> None:
    core = InferenceCore(ServerSettings((tmp_path / "nope", tmp_path, str(tmp_path / "nor"))), BACKENDS)
    with pytest.raises(ModelConfigError, match=r"(?s)/nope is not a directory.*/nor is not a directory"):
        await core.start()


async def test_empty_repository(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="no model found"):
        await InferenceCore(ServerSettings((tmp_path,)), BACKENDS).start()


async def test_a_repository_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelConfigError, match="file is not a directory"):
        await InferenceCore(ServerSettings((tmp_path / "file",)), BACKENDS).start()


async def test_another_config_of_the_same_model(tmp_path: Path) -> None:
    """--model-config-name: for this machine, say; models without one of that name keep theirs."""
    for name in ("a", "b"):
        write_model(tmp_path, name, identity_config())
    (tmp_path / "a/configs").mkdir()
    (tmp_path / "a/configs/big.pbtxt").write_text(identity_config("max_batch_size: 64"))
    async with serving(tmp_path, config_name="big") as core:
        assert core.model_config("a").max_batch_size == 64
        assert core.model_config("b").max_batch_size == 0
        assert list(core.model_metadata("a").versions) == ["1"]


async def test_several_repositories_and_a_name_in_two(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_model(one, "a", identity_config())
    write_model(two, "b", identity_config())
    write_model(one, "twice", identity_config())
    write_model(two, "twice", identity_config())
    core = InferenceCore(ServerSettings((one, two)), BACKENDS)
    await core.start()
    rows = {row.name: (row.state, row.reason) for row in core.repository_index()}
    assert rows["a"] == rows["b"] == ("READY", "")
    assert rows["twice"][0] == "UNAVAILABLE"
    assert f"it is in several repositories: {one}, {two}; keep one" in rows["twice"][1]
    await core.stop(0)


async def test_failed_models_are_listed_and_keep_the_server_unready(tmp_path: Path) -> None:
    write_model(tmp_path, "good", identity_config())
    write_model(tmp_path, "nobackend", identity_config().replace("identity", "caffe"))
    write_model(tmp_path, "typo", identity_config("max_batchsize: 3"))
    async with serving(tmp_path) as core:
        rows = {row.name: row for row in core.repository_index()}
        assert rows["good"].state == "READY"
        assert rows["good"].version == "1"
        assert "unknown backend 'caffe'; known backends: identity, " in rows["nobackend"].reason
        assert "ModelConfig has no field 'max_batchsize'" in rows["typo"].reason
        assert not core.ready()
        assert core.live()
        with pytest.raises(NotFound, match="Request for unknown model: 'typo' has no available versions"):
            await single(core, request("typo", floats(1)))
    async with serving(tmp_path, strict_readiness=False) as core:
        assert core.ready()


async def test_versions_are_served_side_by_side(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def initialize(self, args):
        self.version = int(args["model_version"])
    def execute(self, requests):
        (request,) = requests
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy() * self.version)])]
"""
    config = identity_config("version_policy { specific { versions: [ 2, 3 ] } }").replace("identity", "python")
    for version in (1, 2, 3):
        write_model(tmp_path, "m", config, code, version)
    async with serving(tmp_path) as core:
        answers = {
            version: await single(core, request("m", floats(1), model_version=version)) for version in ("", "2", "3")
        }
        assert {version: values(answer) for version, answer in answers.items()} == {"": [3], "2": [2], "3": [3]}
        assert answers["2"].model_version == "2"
        assert list(core.model_metadata("m").versions) == ["2", "3"]
        assert [(row.name, row.version) for row in core.repository_index()] == [("m", "2"), ("m", "3")]
        with pytest.raises(NotFound, match="Request for unknown model: 'm' version 1 is not found"):
            await single(core, request("m", floats(1), model_version="1"))
        with pytest.raises(InvalidArgument, match="failed to get model version from specified version string 'abc'"):
            core.model_ready("m", "abc")
        assert not core.model_ready("m", "1")
        assert not core.model_ready("nope")


async def test_no_version_under_the_policy(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config("version_policy { specific { versions: 4 } }"))
    async with serving(tmp_path) as core:
        (row,) = core.repository_index()
    assert "at least one version must be available under the version policy of model 'm'" in row.reason


async def test_versions_that_the_policy_names_and_that_are_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, "m", identity_config("version_policy { specific { versions: [ 1, 4, 5 ] } }"))
    async with serving(tmp_path) as core:
        assert list(core.model_metadata("m").versions) == ["1"]
    assert [line for line in caplog.messages if "has no directory" in line] == [
        f"model 'm': version {version} of version_policy specific has no directory" for version in (4, 5)
    ]


async def test_override_for_an_unknown_model_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    core = InferenceCore(ServerSettings((tmp_path,), parameter_overrides={"mm": {"a": "b"}}), BACKENDS)
    with pytest.raises(ModelConfigError, match="model 'mm' does not exist; models: m"):
        await core.start()
