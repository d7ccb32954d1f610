"""Files: model configs, engine directories, checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import pickletools
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from google.protobuf import text_format
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.identity import IdentityBackend
from llmserve.checkpoint.reader import Checkpoint
from llmserve.checkpoint.safetensors_file import DTYPE_NAMES, SafetensorsFile
from llmserve.checkpoint.stored_tensor import DTYPES
from llmserve.checkpoint.torch_file import TorchFile
from llmserve.engine.cpu.layout import CRC_BEGIN, HEADER, read_header, read_linear_layers
from llmserve.engine.directory.artifact import CONFIG_FILE, ENGINE_FILE, MANIFEST_FILE, EngineDirectory
from llmserve.engine.directory.manifest import _seal
from llmserve.engine.native.library import load_library
from llmserve.serving.loading.loader import prepare
from llmserve.serving.loading.repository import read_directory
from llmserve.serving.settings import ServerSettings
from llmserve.stages.tokenizer import load_tokenizer
from tests.engine.cpu.networks import LIMITS, odd_network
from tests.engine.directories import CONFIG, make_engine_directory
from tests.fuzz.adapters import adapters, read_adapter
from tests.fuzz.cuda_engine import cuda_engines, open_cuda_engine
from tests.fuzz.inputs import any_json, damaged, edited, encoded
from tests.fuzz.target import Target
from tests.gguf_files import make_gguf
from tests.quantized_files import METHODS, mxfp4

LAYOUT = struct.Struct("<I")  # the length of the first of two parts


def in_folder(work: Callable[[Path, bytes], None]) -> Callable[[bytes], None]:
    """Give `work` a folder that is gone afterwards."""

    def run(data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            work(Path(folder), data)

    return run


# config.pbtxt

FIELDS = tuple(field.name for field in ModelConfig.DESCRIPTOR.fields)
CONFIGS = (
    'backend: "identity" max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } '
    'output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ ] } label_filename: "labels.txt" }',
    'name: "m" platform: "ensemble" input { name: "X" data_type: TYPE_STRING dims: [ 1 ] } '
    'output { name: "Y" data_type: TYPE_STRING dims: [ 1 ] } ensemble_scheduling { step { model_name: "n" '
    'model_version: -1 input_map { key: "A" value: "X" } output_map { key: "B" value: "Y" } } }',
    'backend: "identity" max_batch_size: 2 input { name: "X" data_type: TYPE_INT32 dims: [ 2, 2 ] } '
    'output { name: "X" data_type: TYPE_INT32 dims: [ 4 ] } sequence_batching { oldest { max_candidate_sequences: 4 } '
    'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } '
    'state { input_name: "I" output_name: "O" data_type: TYPE_FP32 dims: [ 1 ] '
    'initial_state { name: "z" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }',
    'backend: "identity" max_batch_size: 8 dynamic_batching { preferred_batch_size: [ 4, 8 ] priority_levels: 2 '
    "default_priority_level: 1 priority_queue_policy { key: 1 value { timeout_action: DELAY max_queue_size: 3 } } } "
    'instance_group [ { count: 2 kind: KIND_CPU } ] version_policy { specific { versions: [ 1, 3 ] } } '
    'parameters { key: "a" value { string_value: "b" } } response_cache { enable: true } '
    'model_warmup { name: "w" batch_size: 1 '
    'inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }',
)  # fmt: skip


def read_config(folder: Path, data: bytes) -> None:
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/config.pbtxt").write_bytes(data)
    prepare(read_directory("m", folder / "m"), {"identity": IdentityBackend()}, ServerSettings((folder,)))


@st.composite
def config_texts(draw: st.DrawFn) -> bytes:
    """Fields of several configs together."""
    config = ModelConfig()
    for text in draw(st.lists(st.sampled_from(CONFIGS), min_size=1, max_size=2)):
        part: ModelConfig = text_format.Parse(text, ModelConfig())
        for field, _ in part.ListFields():
            if not draw(st.integers(0, 6)):
                part.ClearField(field.name)
        config.MergeFrom(part)
    tail = draw(st.sampled_from(["", *(f"\n{name}: 1" for name in FIELDS), *(f"\n{name} {{ }}" for name in FIELDS)]))
    text = str(text_format.MessageToString(config))
    return (text + tail).encode()


# engine directories


def read_manifest(folder: Path, data: bytes) -> None:
    """The input is the manifest, which is sealed where it can be, and config.json."""
    directory = make_engine_directory(folder / "engine")
    text, config = split(data)
    with suppress(ValueError, AttributeError, TypeError, RecursionError, KeyError):
        content = json.loads(text)
        content.pop("seal")
        if config:
            (directory / CONFIG_FILE).write_bytes(config)
            content["files"][CONFIG_FILE] = {"num_bytes": len(config), "sha256": hashlib.sha256(config).hexdigest()}
        text = encoded({**content, "seal": _seal(content)})
    (directory / MANIFEST_FILE).write_bytes(text)
    opened = EngineDirectory.open(directory)
    opened.info()
    opened.verify()


def two_parts(first: bytes, second: bytes) -> bytes:
    return LAYOUT.pack(len(first)) + first + second


def split(data: bytes) -> tuple[bytes, bytes]:
    """The reverse of `two_parts`, for any bytes."""
    (length,) = LAYOUT.unpack_from(data.ljust(4, b"\0"))
    return data[4 : 4 + length], data[4 + length :]


def good_manifest() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads((make_engine_directory(Path(folder) / "engine") / MANIFEST_FILE).read_text())


def manifests() -> st.SearchStrategy[bytes]:
    good = good_manifest()
    names = (*good, *good["files"], *good["options"], "..", "/etc/hostname", "x/y")
    texts = edited(good, names).map(encoded) | any_json(names).map(encoded)
    configs = edited(CONFIG, ("vocab_size", "max_seq_len", "build_config", "x")).map(encoded) | st.just(b"")
    return st.builds(two_parts, damaged(texts, at_most=1), damaged(configs, at_most=1))


def engine_file() -> bytes:
    options = replace(LIMITS, quantization="int8", dtype="float16")
    with tempfile.TemporaryDirectory() as folder:
        return odd_network().compile(Path(folder) / ENGINE_FILE, options).read_bytes()


ENGINE = engine_file()
NUM_METADATA_BYTES = int(np.frombuffer(ENGINE, HEADER, 1)["metadata_bytes"][0])


def read_engine_file(folder: Path, data: bytes) -> None:
    """The input is the part before the weights; a first byte that is odd seals it with the right checksum."""
    blob = bytearray(data[1:] + ENGINE[NUM_METADATA_BYTES:])
    if data[:1] and data[0] & 1 and len(blob) >= HEADER.itemsize:
        assert HEADER.fields is not None
        at, size = HEADER.fields["metadata_crc"][1], int(np.frombuffer(blob, HEADER, 1)["metadata_bytes"][0])
        blob[at : at + 4] = zlib.crc32(bytes(blob[CRC_BEGIN:size])).to_bytes(4, "little")
    path = folder / ENGINE_FILE
    path.write_bytes(blob)
    for read in (read_header, read_linear_layers, open_natively):
        try:
            read(path)
        except Exception as error:
            failure: Exception = error
        else:
            continue
        raise failure


def open_natively(path: Path) -> None:
    library = load_library()
    library.close(library.open(path, isa="", num_blocks=4, threads=1))


# checkpoints


def read_safetensors(folder: Path, data: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    file = SafetensorsFile(path)
    for name in file.tensors:
        file.read(name)
    file.close()


@st.composite
def safetensors(draw: st.DrawFn) -> bytes:
    good = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [16, 18]},
        "__metadata__": {"format": "pt"},
    }
    names = ("a", "c", "dtype", "shape", "data_offsets", "__metadata__")
    header = encoded(draw(edited(good, names) | any_json(names)))
    length = draw(st.just(len(header)) | st.integers(0, 2 * len(header)) | st.sampled_from([2**32, 2**63, 2**64 - 1]))
    return struct.pack("<Q", length) + header + bytes(18)


def read_torch(folder: Path, data: bytes) -> None:
    path = folder / "pytorch_model.bin"
    path.write_bytes(data)
    file = TorchFile(path)
    for name in file.tensors:
        file.read(name)
    file.close()


def torch_archive(pickled: bytes, storage: bytes = bytes(64)) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", storage)
    return buffer.getvalue()


def pickled_tensors() -> bytes:
    """What torch writes for {"a": a view of 2 x 2 floats}."""
    return (
        b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
        b"ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x04tq\x07QK\x00K\x02K\x02\x86q\x08"
        b"K\x02K\x01\x86q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rs."
    )


OPCODES = tuple(opcode.code.encode("latin-1") for opcode in pickletools.opcodes)
ARGUMENTS = (
    b"\x00", b"\x01\x00\x00\x00a", b"\xff\xff\xff\x7f", b"\xff" * 8, b"ctorch\nHalfStorage\n", b"cos\nsystem\n",
    b"ctorch._utils\n_rebuild_parameter\n", pickle.dumps([(), {}, "x" * 5, 2**70, -1, b"y", 1.5, None], 2)[2:-1],
)  # fmt: skip


@st.composite
def torch_files(draw: st.DrawFn) -> bytes:
    """A pickle with operations put in and taken out, in a sound archive; or an archive that is damaged."""
    good = pickled_tensors()
    ends = [position for _, _, position in pickletools.genops(good) if position is not None]
    pieces = [good[begin:end] for begin, end in zip(ends, [*ends[1:], len(good)], strict=True)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(pieces)))
        piece = draw(st.sampled_from(pieces or [b"."]) | st.sampled_from(OPCODES) | st.sampled_from(ARGUMENTS))
        if draw(st.booleans()):
            pieces.insert(at, piece)
        else:
            del pieces[at : at + 1]
    return torch_archive(draw(damaged(st.just(b"".join(pieces)), at_most=1)))


SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 300}


def gguf_headers() -> list[bytes]:
    """Of small files with tokenizers of both kinds, without the data."""
    with tempfile.TemporaryDirectory() as folder:
        files = [
            make_gguf(Path(folder) / f"{kind}.gguf", model, tokenizer=kind, **SMALL)
            for kind, model in (("bpe", "qwen2"), ("pieces", "llama"))
        ]
        return [path.read_bytes()[: gguf.GGUFReader(path).data_offset] for path in files]


def read_gguf(folder: Path, data: bytes) -> None:
    """The input is the header; the numbers are zeros. What is made of it is read as an engine's files are."""
    path = folder / "m.gguf"
    path.write_bytes(data + bytes(1 << 17))
    with Checkpoint.open(path) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
            if (content := checkpoint.text_file(name)) is not None:
                (folder / name).write_bytes(content)
    if (folder / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(folder)
        tokenizer.decode(tokenizer.encode("the <s> quiet\nhill 12 é 🦙", add_special_tokens=True))


MODULE = "model.layers.0.self_attn.q_proj"
STORED = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MAX_VALUES = 1 << 16


def read_quantized(folder: Path, data: bytes) -> None:
    """The input: a quantization config, the types and shapes of one module's tensors, and their bytes, which repeat."""
    head, values = split(data)
    config, listed = split(head)
    (folder / "config.json").write_bytes(b'{"quantization_config": ' + config + b"}")
    header: dict[str, Any] = {}
    end = 0
    with suppress(ValueError, AttributeError, TypeError, RecursionError, KeyError):
        for part, (dtype, shape) in json.loads(listed).items():
            if not all(type(number) is int and number >= 0 for number in shape):
                continue
            if (size := math.prod(shape) * DTYPES[DTYPE_NAMES[dtype]].itemsize) <= MAX_VALUES:
                header[part] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
    text = encoded(header)
    content = (values or b"\0") * (end // max(1, len(values)) + 1)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[:end])
    with Checkpoint.open(folder) as checkpoint:
        for name in checkpoint.tensors:
            checkpoint.read(name)


@st.composite
def quantized(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([*METHODS.values(), mxfp4()]))
    stored = method.encode(np.random.default_rng(1), 32, 64).parts
    listed = {f"{MODULE}.{part}": [STORED[values.dtype.name], list(values.shape)] for part, values in stored.items()}
    names = (*method.config, *listed, "I32", "F8_E4M3", "F8_E8M0", "dynamic", "sym", "re:.*", "bits", "actorder")
    config = encoded(draw(st.just(method.config) | edited(dict(method.config), names)))
    tensors = encoded(draw(st.just(listed) | edited(listed, names)))
    values = b"".join(np.ascontiguousarray(part).tobytes() for part in stored.values())
    return two_parts(two_parts(config, tensors), draw(st.just(values) | damaged(st.just(values), at_most=2)))


def read_adapter_parts(folder: Path, data: bytes) -> None:
    head, values = split(data)
    read_adapter(folder, *split(head), values)


def file_targets() -> list[Target]:
    metadata = damaged(st.just(ENGINE[:NUM_METADATA_BYTES]), at_most=3)
    return [
        Target(
            "config",
            damaged(config_texts() | st.sampled_from([text.encode() for text in CONFIGS])),
            in_folder(read_config),
        ),
        Target("manifest", manifests(), in_folder(read_manifest)),
        Target(
            "engine",
            st.builds(bytes.__add__, st.sampled_from([b"\0", b"\1", b"\1"]), metadata),
            in_folder(read_engine_file),
        ),
        Target("cuda-engine", cuda_engines(), in_folder(open_cuda_engine)),
        Target("safetensors", damaged(safetensors(), at_most=1), in_folder(read_safetensors)),
        Target("quantized", damaged(quantized(), at_most=1), in_folder(read_quantized)),
        Target(
            "adapter",
            adapters().map(lambda parts: two_parts(two_parts(parts[0], parts[1]), parts[2])),
            in_folder(read_adapter_parts),
        ),
        Target("gguf", damaged(st.sampled_from(gguf_headers())), in_folder(read_gguf)),
        Target("torch", torch_files() | damaged(torch_files()), in_folder(read_torch)),
    ]
