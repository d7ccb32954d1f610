"""Headers of CUDA engine files, sealed whatever they say, as far as a device is asked: everything but the steps."""

from __future__ import annotations

import copy
import json
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from llmserve.builder.targets.cuda.tiles import ProductTile
from llmserve.engine.cuda.layout import FORMAT_VERSION, MAGIC, PAGE_BYTES, PREFIX
from llmserve.engine.cuda.runner import CudaRunner
from llmserve.engine.directory.artifact import ENGINE_FILE
from tests.engine.cpu.networks import LIMITS, odd_network
from tests.engine.cuda.engines import SMALL_TILES, compile_engine
from tests.engine.cuda.fake_device import FakeDevice
from tests.fuzz.inputs import EDGES, NUMBERS, any_json, encoded

DEVICE_BYTES = 1 << 26
NUM_BLOCKS = 4
TILES = replace(  # with something to tune
    SMALL_TILES,
    integers=(*SMALL_TILES.integers[:-1], SMALL_TILES.integers[-1]._replace(others=(ProductTile(16, 64, 4, 3),))),
)
SPECIAL = st.sampled_from(
    [
        "tensor",
        "buffer",
        "input",
        "keys",
        "values",
        "states",
        "scratch",
        "logits",
        "choice",
        "head",
        "body",
        "",
        "0",
        "7",
        "\ud800",
        "int8",
    ]
)


def good_file() -> bytes:
    options = replace(LIMITS, target="cuda", given={"gpu": "sm_90"}, quantization="int8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ENGINE_FILE
        return compile_engine(odd_network(alibi=True, layers=1), path, options, tiles=TILES).read_bytes()


ENGINE = good_file()
TEXT_BYTES = PREFIX.unpack(ENGINE[: PREFIX.size])[2]
TEXT = ENGINE[PREFIX.size : PREFIX.size + TEXT_BYTES]
DATA = ENGINE[-(-(PREFIX.size + TEXT_BYTES) // PAGE_BYTES) * PAGE_BYTES :]


def sealed(text: bytes) -> bytes:
    """An engine file with this header, and the good one's data."""
    blob = PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), zlib.crc32(text)) + text
    return blob.ljust(-(-len(blob) // PAGE_BYTES) * PAGE_BYTES, b"\0") + DATA


def open_cuda_engine(folder: Path, text: bytes) -> None:
    """What lies outside of an allocation, or is not aligned as promised, is an AssertionError of the fake device's."""
    path = folder / ENGINE_FILE
    path.write_bytes(sealed(text))
    CudaRunner(path, FakeDevice(total_bytes=DEVICE_BYTES), num_blocks=NUM_BLOCKS, threads=1, keeps_all=False).close()


@st.composite
def cuda_engines(draw: st.DrawFn) -> bytes:
    """The good header, with a few of its members changed, moved, taken out or doubled, however deep."""
    document: Any = json.loads(TEXT)
    for _ in range(draw(st.integers(0, 3))):
        holder: Any = document
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 8)):
                holder = holder[key]
                continue
            change(draw, holder, key)
            break
    text = encoded(document)
    if not draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(EDGES)) + text[at + draw(st.integers(0, 4)) :]
    return text


def change(draw: st.DrawFn, holder: Any, key: Any) -> None:
    """One member of it."""
    match draw(st.integers(0, 5)):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(draw(st.sampled_from(holder))))
        case 2 if isinstance(holder[key], int):
            holder[key] += draw(st.integers(-70, 70))
        case 3:
            holder[key] = draw(any_json(("fixed", "x", "sm_90")))
        case 4:
            holder[key] = draw(SPECIAL)
        case _:
            holder[key] = draw(NUMBERS)
