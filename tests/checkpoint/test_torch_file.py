"""pytorch_model.bin: views and parameters as torch writes them, and files that are damaged or mean harm."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmserve.checkpoint.torch_file import TorchFile
from llmserve.errors import CheckpointError


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    return str(caught.value)


def save(path: Path, content: Any) -> TorchFile:
    torch.save(content, path / "w.bin")
    return TorchFile(path / "w.bin")


def archive(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


def test_views_parameters_and_state_dicts(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "whole": base,
        "transposed": base.t(),
        "block": base[1:3, 2:5],
        "every second": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0])[:, None].expand(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(2, 3, dtype=torch.float16)),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "long": torch.arange(3),
    }
    found = save(tmp_path, content)
    assert set(found.tensors) == set(content)
    for name, tensor in content.items():
        assert found.tensors[name].shape == tuple(tensor.shape)
        assert np.array_equal(found.read(name), tensor.detach().numpy()), name


def test_a_module_state_dict_with_metadata(tmp_path: Path) -> None:
    linear = torch.nn.Linear(3, 2)
    module = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(2))
    found = save(tmp_path, module.state_dict())  # an OrderedDict with a `_metadata` attribute
    assert np.array_equal(found.read("0.weight"), linear.weight.detach().numpy())
    assert found.tensors["1.num_batches_tracked"].dtype == "int64"


def test_reading_is_a_view_of_the_file(tmp_path: Path) -> None:
    tensor = save(tmp_path, {"x": torch.ones(1000)}).read("x")
    assert not tensor.flags.writeable
    assert not tensor.flags.owndata


class Harmful:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("kind", ["torch.save", "bare archive", "inside a tensor dictionary"])
def test_a_pickle_that_calls_os_system_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    harmful = Harmful(f"touch {trap}")
    path = tmp_path / "w.bin"
    if kind == "torch.save":
        torch.save(harmful, path)
    elif kind == "bare archive":
        archive(path, {"w/data.pkl": pickle.dumps(harmful)})
    else:
        torch.save({"model.norm.weight": torch.ones(2), "x": harmful}, path)
    message = refusal(path)
    assert "w.bin refused: the pickle asks for posix.system" in message
    assert "nothing was run" in message
    assert not trap.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(V1\ntR.",
        b"cbuiltins\n__import__\n(Vos\ntR.",
        b"ctorch.hub\nload\n.",
        b"ctorch\nload\n.",
        b"ccollections\nOrderedDict.fromkeys\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93.",  # STACK_GLOBAL
        b"(ios\nsystem\n.",  # INST
        b"\x80\x02\x82\x01.",  # extension registry
    ],
    ids=["eval", "import", "torch.hub", "torch.load", "dotted", "stack global", "inst", "extension"],
)
def test_other_globals_are_refused(program: bytes, tmp_path: Path) -> None:
    message = refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program}))
    assert "refused" in message or "damaged pickle" in message


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02}q\x00(X\xff\xff\xff\x7f",
        b"\x80\x02}r\xff\xff\xff\x1f.",  # a memo index that asks for gigabytes
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\nNNtR.",
        b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",  # a key whose hash would overflow the stack
        b"ctorch._utils\n_rebuild_parameter\n(I1\ntR.",
        b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI-1\ntQ.",
        b"Vnot a storage\nQ.",
        b"ctorch\nFloatStorage\n(tR.",
        b"ccollections\nOrderedDict\n(I1\ntR.",
    ],
    ids=range(11),
)
def test_a_damaged_pickle(program: bytes, tmp_path: Path) -> None:
    assert "w.bin has a damaged pickle" in refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program}))


def test_content_that_is_no_dictionary_of_tensors(tmp_path: Path) -> None:
    for content, problem in (
        ([torch.ones(2)], "contains a list instead of a dictionary of tensors"),
        ({"state_dict": {"x": torch.ones(2)}}, "entry 'state_dict' is not a tensor"),
        ({"x": torch.ones(2), "step": 3}, "entry 'step' is not a tensor"),
        ({3: torch.ones(2)}, "entry 3 is not a tensor"),
        (OrderedDict(x=None), "entry 'x' is not a tensor"),
    ):
        torch.save(content, tmp_path / "w.bin")
        assert problem in refusal(tmp_path / "w.bin")


def tensor_pickle(
    *, offset: int = 0, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), state: bytes = b""
) -> bytes:
    """What torch writes for {"x": a view of a storage of four floats}; `state` are opcodes that follow the tensor."""

    def ints(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"I%d\n" % value for value in values) + b"t"

    storage = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"I%d\n" % offset + ints(shape) + ints(stride) + b"tR"
    return b"\x80\x02}Vx\n" + tensor + state + b"s."


def test_a_view_outside_its_storage(tmp_path: Path) -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    good = archive(tmp_path / "good.bin", {"w/data.pkl": tensor_pickle(), "w/data/0": data})
    assert TorchFile(good).read("x").tolist() == [0.0, 1.0, 2.0, 3.0]
    for view in (
        {"offset": 1},
        {"shape": (5,)},
        {"stride": (2,)},
        {"offset": -1},
        {"stride": (-1,)},
        {"shape": (-4,)},
        {"shape": (2, 2)},
        {"shape": (1 << 62,), "stride": (1 << 62,)},
        {"shape": (1,), "stride": (1 << 70,)},  # no element uses the stride, but numpy would
        {"shape": (1 << 40, 1 << 40), "stride": (0, 0)},
        {"shape": (0, 1 << 40, 1 << 40), "stride": (0, 0, 0)},
        {"shape": (1,) * 65, "stride": (1,) * 65},
        {"shape": (4, 1)},
    ):
        bad = archive(tmp_path / "bad.bin", {"w/data.pkl": tensor_pickle(**view), "w/data/0": data})
        assert "bad.bin is damaged: tensor 'x' " in refusal(bad)


@pytest.mark.parametrize(
    "state",
    [
        b"((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQI0\n(I4\nt(I268435456\nttb",
        b"((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQI0\n(I4\nt(I268435456\ntlb",
        b"(NI0\n(I4\nt(I268435456\nttb",
        b"}Vstride\n(I268435456\ntsb",
        b"N}Vstride\n(I268435456\nts\x86b",
        b"N}Vstorage\nNs\x86b",
        b"N}V__class__\nccollections\nOrderedDict\ns\x86b",
        b"}b",
    ],
)
def test_a_state_set_after_the_tensor_was_made(state: bytes, tmp_path: Path) -> None:
    """The opcode BUILD on a tensor: no way around the checks."""
    data = np.arange(4, dtype=np.float32).tobytes()
    path = archive(tmp_path / "w.bin", {"w/data.pkl": tensor_pickle(state=state), "w/data/0": data})
    try:
        found = TorchFile(path)
    except CheckpointError:
        return
    assert found.read("x").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_dtype_and_a_storage_changed_afterwards(tmp_path: Path) -> None:
    storage_type = b"\x80\x02}Vx\nctorch._utils\n_rebuild_tensor_v2\n((Vstorage\nctorch\nFloatStorage\n"
    rest = b"I0\n(I4\nt(I1\nttRs."
    for program in (
        storage_type + b"(Vcomplex\nlbV0\nVcpu\nI4\ntQ" + rest,  # the state of the storage type: its dtype
        storage_type + b"V0\nVcpu\nI4\ntQ(Vcomplex\nV0\nI99\nlb" + rest,  # of the storage: dtype, key, size
        storage_type + b"V0\nVcpu\nI4\ntQ(Vfloat32\nNI99\nlb" + rest,
    ):
        assert "damaged" in refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program, "w/data/0": b"\0" * 16}))


def test_a_tensor_without_a_storage(tmp_path: Path) -> None:
    program = b"\x80\x02}Vx\nctorch._utils\n_rebuild_tensor_v2\n(NI0\n))tRs."
    assert "tensor 'x' has no storage" in refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program}))


def test_a_dictionary_whose_methods_are_hidden(tmp_path: Path) -> None:
    """BUILD gives an OrderedDict attributes; torch itself does that with `_metadata`."""
    for name in (b"items", b"keys", b"__class__"):
        hidden = b"ccollections\nOrderedDict\n)RVx\nI1\ns}V" + name + b"\nccollections\nOrderedDict\nsb."
        program = b"\x80\x02" + hidden
        assert "entry 'x' is not a tensor" in refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program}))


def test_a_pickle_leaves_nothing_behind(tmp_path: Path) -> None:
    """A function in reach of BUILD would keep the attributes that one file gave it, for every later file."""
    for name in (b"_rebuild_tensor_v2", b"_rebuild_parameter"):
        program = b"\x80\x02ctorch._utils\n" + name + b"\n}Vmark\nI1\nsb."
        assert "damaged pickle" in refusal(archive(tmp_path / "w.bin", {"w/data.pkl": program}))


def test_a_storage_that_is_short_or_missing(tmp_path: Path) -> None:
    short = archive(tmp_path / "w.bin", {"w/data.pkl": tensor_pickle(), "w/data/0": b"\0" * 15})
    assert "storage '0' needs 16 bytes but has 15" in refusal(short)
    missing = archive(tmp_path / "w.bin", {"w/data.pkl": tensor_pickle()})
    assert "storage '0' needs 16 bytes but has 0" in refusal(missing)


def test_a_local_header_that_lies(tmp_path: Path) -> None:
    """The directory is right, but the entry's own header claims a name that reaches past the end of the file."""
    path = archive(tmp_path / "w.bin", {"w/data.pkl": tensor_pickle(), "w/data/0": b"\0" * 16})
    with zipfile.ZipFile(path) as file:
        start = file.getinfo("w/data/0").header_offset
    content = bytearray(path.read_bytes())
    content[start + 26 : start + 28] = struct.pack("<H", 0xFFFF)
    path.write_bytes(content)
    assert "storage '0' is outside the file" in refusal(path)


def test_archives_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    assert "0 entries named data.pkl" in refusal(archive(path, {"readme": b""}))
    assert "2 entries named data.pkl" in refusal(archive(path, {"a/data.pkl": b".", "b/data.pkl": b"."}))
    assert "compressed entries" in refusal(archive(path, {"w/data.pkl": b"}."}, zipfile.ZIP_DEFLATED))
    assert "big-endian" in refusal(archive(path, {"w/data.pkl": b"}.", "w/byteorder": b"big"}))
    path.write_bytes(b"no archive")
    assert "damaged, or is not a torch file" in refusal(path)


def legacy(path: Path, content: Any) -> Path:
    """As torch before 1.6 wrote it."""
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_files_of_torch_before_1_6(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "whole": base,
        "transposed": base.t(),
        "block": base[1:3, 2:5],
        "half": torch.nn.Parameter(torch.ones(3, 5, dtype=torch.float16)),
        "empty": torch.empty(0, 3),
        "long": torch.arange(3),
    }
    found = TorchFile(legacy(tmp_path / "w.bin", content))
    assert set(found.tensors) == set(content)
    for name, tensor in content.items():
        assert found.tensors[name].shape == tuple(tensor.shape)
        assert np.array_equal(found.read(name), tensor.detach().numpy()), name
    found = TorchFile(legacy(tmp_path / "b.bin", {"x": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}))
    assert found.read("x").astype(np.float32).tolist() == [1.5, -2.0]
    assert not found.read("x").flags.owndata


class Command:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("true",)


def test_damaged_and_hostile_files_of_torch_before_1_6(tmp_path: Path) -> None:
    path = legacy(tmp_path / "w.bin", {"x": torch.ones(3, 4), "y": torch.ones(2)})
    good = path.read_bytes()
    for size in (20, 40, 200, len(good) - 1):
        path.write_bytes(good[:size])
        assert "damaged" in refusal(path)
    path.write_bytes(good.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89"))
    assert "big-endian" in refusal(path)
    at = good.rindex((12).to_bytes(8, "little"))
    path.write_bytes(good[:at] + (13).to_bytes(8, "little") + good[at + 8 :])
    assert "does not have 12 elements" in refusal(path)
    path.write_bytes(good.replace(pickle.dumps(1001, 2), pickle.dumps(1002, 2)))
    assert "protocol" in refusal(path)
    legacy(path, {"x": torch.ones(2), "y": Command()})
    assert "asks for posix.system" in refusal(path)
