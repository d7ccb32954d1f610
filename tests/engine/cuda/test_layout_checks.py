"""What a CUDA engine file may not say: refused when it is read, every problem at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import EngineFileError
from tests.fuzz.cuda_engine import TEXT, open_cuda_engine

Change = Callable[[dict[str, Any]], None]


def changed(*path: Any, to: Any) -> Change:
    """The member of the header that `path` leads to has another value."""

    def change(header: dict[str, Any]) -> None:
        holder: Any = header
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = to

    return change


def taken_out(*path: Any) -> Change:
    """Such a member is not there."""

    def change(header: dict[str, Any]) -> None:
        holder: Any = header
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]

    return change


def refusal(folder: Path, *changes: Change) -> str:
    header = json.loads(TEXT)
    for change in changes:
        change(header)
    with pytest.raises(EngineFileError) as caught:
        open_cuda_engine(folder, json.dumps(header).encode())
    return str(caught.value)


def test_the_file_that_is_changed_below_is_sound(tmp_path: Path) -> None:
    open_cuda_engine(tmp_path, TEXT)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed("dtype", to="int8"), "dtype is 'int8'"),
        (changed("block_size", to=0), "block_size is 0"),
        (changed("max_num_tokens", to=True), "max_num_tokens is True"),
        (changed("scratch_bytes", to=-1), "scratch_bytes is -1"),
        (changed("state_bytes", to=24), "state_bytes is 24, which is not a multiple of 16"),
        (changed("layer_heads", to=[[1, 4], [1, 4]]), "layer_heads has 2 layers"),
        (changed("layer_heads", to=[[1, 0]]), "the heads of layer 0 are (1, 0)"),
        (changed("buffers", 1, to=1.5), "buffer 1 is 1.5"),
        (changed("head_rows", to=97), "head_rows is 97, more than max_num_tokens"),
        (changed("tensors_begin", to=1 << 40), "tensors begin at 1099511627776, after the end of the data"),
        (changed("kernels", 0, "types", 0, 1, to="*fp8"), "kernel 0 is not valid"),
        (changed("binaries", to={}), "there are no binaries"),
        (taken_out("binaries", "sm_90", 0), "'sm_90' has 43 binaries for 44 kernels"),
        (changed("binaries", "sm_90", 2, 4, to=1 << 30), "the binary of kernel 2 for 'sm_90' is not valid: ('words"),
        (changed("binaries", "sm_90", 2, 1, to=48), "the binary of kernel 2"),
        (changed("binaries", "sm_90", 2, 2, to=1 << 20), "the binary of kernel 2"),
        (changed("binaries", "sm_90", 2, 3, to=2), "the binary of kernel 2"),
        (changed("tensors", 0, 2, to=1 << 20), "tensor ('embed', 'float32', 1048576, 42, 20480) has no valid place"),
        (changed("tensors", 1, 4, to=20480), "tensor ('0.norm'"),
        (changed("launches", 0, 0, to=44), "launch 0 is of kernel 44"),
        (taken_out("launches", 0, 1, 0), "launch 0 (rowwise.embed) has 3 arguments"),
        (changed("launches", 0, 1, 0, 1, to="weights"), "launch 0 (rowwise.embed) has token_ids at ('input'"),
        (changed("launches", 0, 1, 2, 1, to="gone"), "launch 0 (rowwise.embed) has table at ('tensor', 'gone', 0)"),
        (changed("launches", 0, 1, 2, 2, to=-16), "launch 0 (rowwise.embed) has table at ('tensor', 'embed', -16)"),
        (changed("launches", 0, 1, 3, 1, to="50"), "launch 0 (rowwise.embed) has y at ('buffer', '50', 0)"),
        (changed("launches", 0, 1, 3, 2, to=192), "launch 0 (rowwise.embed) has y at ('buffer', '0', 192)"),
        (changed("launches", 0, 1, 3, 2, to=4), "launch 0 (rowwise.embed) has y at ('buffer', '0', 4)"),
        (changed("launches", 8, 1, 6, 1, to="1"), "launch 8 (attention.write_cache) has keys at ('keys', '1', 0)"),
        (changed("launches", 0, 2, 1, 1, to=65536), "launch 0 (rowwise.embed) has the grid"),
        (changed("launches", 4, 2, 0, 0, to=8), "launch 4 (linear.linear) has the grid"),
        (changed("launches", 0, 3, to="tail"), "launch 0 (rowwise.embed) is of part 'tail'"),
        (changed("launches", 0, 4, to=0), "launch 0 (rowwise.embed) runs for (0, 1073741824) rows"),
        (changed("tactics", "5", 0, 0, to=99), "a tactic of kernel 5 is kernel 99"),
        (changed("tactics", "5", 0, 0, to=0), "kernel 0 takes different arguments from kernel 5, whose tactic it is"),
        (changed("tactics", "5", 0, 1, 0, 0, to=32), "a tactic of kernel 5 (linear.linear) has the grid"),
        (changed("tactics", "5", 0, 1, 1, 1, to=65536), "a tactic of kernel 5 (linear.linear) has the grid"),
        (changed("tactics", "0", to=[]), "kernel 0 (rowwise.embed) has tactics, but is not a product"),
        (changed("tactics", "18", to=[]), "kernel 18 has tactics but is never launched"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(change: Change, problem: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, change)
    assert "has an invalid header; build the engine again" in message
    assert problem in message


def test_all_problems_are_listed(tmp_path: Path) -> None:
    """Of what is checked together: addresses mean nothing where sizes do not."""
    launches = (changed("launches", place, 1, 0, 2, to=1 << 50) for place in range(3))
    message = refusal(tmp_path, *launches)
    assert "(3 problems)" in message
    assert re.findall(r"launch (\d)", message) == ["0", "1", "2"]


@pytest.mark.parametrize("window", [-1, 1.5, "all", True])
def test_a_window_is_a_number_of_positions(window: object, tmp_path: Path) -> None:
    """For blocks are given back by it."""
    kernels = json.loads(TEXT)["kernels"]
    place, kernel = next((i, each) for i, each in enumerate(kernels) if "WINDOW" in dict(each["constants"]))
    of_constant = [name for name, _ in kernel["constants"]].index("WINDOW")
    change = changed("kernels", place, "constants", of_constant, 1, to=window)
    assert f"kernel {place} is not valid" in refusal(tmp_path, change)
