"""Files that a config names: they lie in the model's directory, whoever has written the config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmserve.errors import InvalidArgument
from llmserve.serving.config.files import is_inside, read_inside
from llmserve.serving.core import InferenceCore
from llmserve.serving.settings import ControlMode
from tests.serving.models import identity_config, serving, tensors, write_model

INPUT = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "PATH" } }'
INITIAL = 'initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] data_file: "PATH" }'
STATE = f'state {{ input_name: "A" output_name: "B" data_type: TYPE_FP32 dims: [ 1 ] {INITIAL} }}'
LABELS = "\n".join(
    (
        'backend: "identity"',
        tensors("input", X="FP32 [ -1 ]"),
        tensors("output", Y='FP32 [ -1 ] label_filename: "PATH"'),
    )
)


@pytest.mark.parametrize("path", ["a", "a/b", "./a", "a/./b", "..a", "a..", "$x"])
def test_paths_inside(path: str) -> None:
    assert is_inside(path)


@pytest.mark.parametrize("path", ["", ".", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\0b"])
def test_paths_that_are_not(path: str) -> None:
    assert not is_inside(path)


def test_links_inside_are_followed_and_those_that_lead_out_are_not(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store/labels").write_bytes(b"secret")
    model = tmp_path / "real"
    (model / "..data").mkdir(parents=True)
    (model / "..data/labels").write_bytes(b"cat")
    (model / "labels").symlink_to("..data/labels")
    (model / "out").symlink_to(tmp_path / "store/labels")
    (model / "folder").symlink_to(tmp_path / "store")
    (tmp_path / "link").symlink_to(model)
    assert read_inside(tmp_path / "link", "labels") == b"cat"
    for path in ("out", "folder/labels", "../store/labels", str(tmp_path / "store/labels")):
        with pytest.raises(OSError, match="leads out of the model's directory"):
            read_inside(tmp_path / "link", path)


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "1/../../secret"])
@pytest.mark.parametrize(
    ("config", "what"),
    [
        (LABELS, "label_filename of output 'Y'"),
        (identity_config(f"sequence_batching {{ {STATE} }}"), "data_file of initial state 'zero'"),
        (identity_config(f'model_warmup {{ name: "w" {INPUT} }}'), "input_data_file of model_warmup 'w', input 'X'"),
        (identity_config('default_model_filename: "PATH"'), "default_model_filename"),
        (identity_config('cc_model_filenames { key: "9.0" value: "PATH" }'), "cc_model_filenames of '9.0'"),
    ],
    ids=["label", "state", "warmup", "model", "cc"],
)
async def test_a_config_that_names_a_file_elsewhere(tmp_path: Path, config: str, what: str, path: str) -> None:
    (tmp_path / "secret").write_text("root:x\n")
    write_model(tmp_path / "models", "m", config.replace("PATH", path))
    async with serving(tmp_path / "models") as core:
        (row,) = core.repository_index()
    assert row.state == "UNAVAILABLE"
    assert what in row.reason
    assert f"'{path}' is not a path inside the model's directory" in row.reason


async def test_a_link_to_labels_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:x\n")
    directory = write_model(tmp_path / "models", "m", LABELS.replace("PATH", "labels.txt"))
    (directory / "labels.txt").symlink_to("../../secret")
    async with serving(tmp_path / "models") as core:
        (row,) = core.repository_index()
        assert "label_filename of output 'Y' cannot be read" in row.reason
        assert "leads out of the model's directory" in row.reason


async def test_a_client_cannot_name_the_servers_files_either(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    config = {
        "backend": "identity",
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1], "label_filename": "/etc/passwd"}],
    }
    async with serving(tmp_path, control_mode=ControlMode.EXPLICIT) as core:
        assert isinstance(core, InferenceCore)
        with pytest.raises(InvalidArgument, match="label_filename of output 'Y' '/etc/passwd' is not a path inside"):
            await core.load_model("m", json.dumps(config), {})
