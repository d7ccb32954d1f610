"""Converts PEFT's folder to an adapter directory for one engine: `llmserve adapter build`.

Matrices have the checkpoint's names. An engine has them as rows of its Program's parameters, possibly in another order
(`Param.sources` and `Param.orders`). Everything that does not fit is found before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmserve.builder.output import ADAPTER, staged_directory
from llmserve.checkpoint.adapters.files import ADAPTER_FILES, Adapter, LowRank
from llmserve.checkpoint.plan import row_factors
from llmserve.checkpoint.rearranged import row_order
from llmserve.engine.adapters.sealed import (
    ADAPTER_FILE,
    CONFIG_FILE,
    MAX_RANK,
    AdapterManifest,
    AdapterPart,
    PartShape,
    SealedAdapter,
    seal_adapter,
)
from llmserve.engine.directory.artifact import SELFTEST_FILE, EngineDirectory, hash_file, rebuild_command
from llmserve.engine.directory.factors import FACTORS_FILE, Factors
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.verify import verify_adapter
from llmserve.engine.registry import runtime_for
from llmserve.errors import CheckpointError, EngineFileError, Unsupported, raise_problems
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import AUTO, BFLOAT16, CACHES, FLOAT32, FLOATS
from llmserve.models.registry import architecture_for
from llmserve.models.spec import DecoderSpec, Param, RowOrder

MAX_LISTED = 20
MERGE = "merge the adapter into an engine with: llmserve build CHECKPOINT --lora ADAPTER"
IS_NOT_ADAPTED = {
    OpKind.EMBED: "an embedding",
    OpKind.LOGITS: "the head",
    OpKind.EXPERTS: "a matrix of experts",
}


class Place(NamedTuple):
    """The place of a checkpoint's matrix among the parameters of a Program."""

    param: str
    begin: int
    shape: tuple[int, ...]
    order: RowOrder | None
    multipliers: NDArray[np.float32] | None  # of its rows in the parameter
    kinds: frozenset[OpKind]  # kinds of the ops that read the parameter
    is_factor: bool  # the parameter is its product with another matrix


def build_adapter(folder: Path, engine: Path, output: Path) -> AdapterManifest:
    """Write the adapter directory `output`, which appears complete or not at all.

    Raises `CheckpointError` listing everything that is wrong with the adapter or does not fit the engine, and
    `Unsupported` for an engine that does not support adapters.
    """
    directory = EngineDirectory.open(engine)
    factors = _factors(directory)
    adapter = Adapter.read(folder)
    places = _places(directory)
    problems = list(_problems(adapter, places))
    if len(problems) > MAX_LISTED:
        problems[MAX_LISTED:] = [f"... and {len(problems) - MAX_LISTED} more"]
    raise_problems(CheckpointError, f"adapter {folder} does not fit engine {engine}", problems)
    dtype = _dtype(directory.manifest)
    parts = [_part(change, places[name], dtype, factors, name) for name, change in sorted(adapter.changes.items())]
    base, config = directory.manifest.engine_digest, (folder / CONFIG_FILE).read_bytes()
    source = source_digest(folder)
    with staged_directory(output, ADAPTER) as staged:
        manifest = seal_adapter(staged, parts, base_digest=base, source_digest=source, config=config)
        return _with_selftest(SealedAdapter(staged, manifest), directory)


def _with_selftest(adapter: SealedAdapter, directory: EngineDirectory) -> AdapterManifest:
    """Add the self-test and run it, if the engine's target supports adapters."""
    test = runtime_for(directory.manifest.target).adapter_selftest(directory, adapter)
    if test is None:
        return adapter.manifest
    test.save(adapter.path / SELFTEST_FILE)
    manifest = replace(adapter.manifest, selftest_sha256=hash_file(adapter.path / SELFTEST_FILE))
    (adapter.path / ADAPTER_FILE).write_text(manifest.to_json())
    result = verify_adapter(SealedAdapter(adapter.path, manifest), directory)
    if result is None or not result.passed:
        raise EngineFileError(
            f"with the adapter, this machine's kernels compute different results than the portable ones: {result}; "
            f"check the engine with: llmserve inspect {directory.path}; if it passes, report a bug"
        )
    return manifest


def source_digest(folder: Path) -> str:
    """The digest of PEFT's files."""
    return hashlib.sha256("".join(hash_file(folder / name) for name in ADAPTER_FILES).encode()).hexdigest()


def _factors(directory: EngineDirectory) -> Factors:
    """The factors that the engine's matrices were multiplied with; empty if no matrix is rounded."""
    options = directory.manifest.options
    if FACTORS_FILE in directory.manifest.files:
        return Factors.load(directory.path / FACTORS_FILE)
    cache = str(options.get("kv_cache_dtype", AUTO))
    if options["quantization"] or (cache != AUTO and CACHES[cache].is_rounded):
        raise Unsupported(
            f"engine {directory.path} is quantized but has no {FACTORS_FILE}: an older llmserve built it; "
            f"rebuild it with: {rebuild_command(directory.path)}"
        )
    return Factors()


def _dtype(manifest: Manifest) -> str:
    """The dtype of the adapter's numbers: the engine's, or one with a wider range if factors multiply them."""
    dtype = FLOATS[str(manifest.options["dtype"])]
    return BFLOAT16.name if FACTORS_FILE in manifest.files and dtype.bits < FLOAT32.bits else dtype.name


def _places(directory: EngineDirectory) -> Mapping[str, Place]:
    config = directory.hf_config
    architecture = architecture_for(config)
    spec: DecoderSpec = architecture.from_hf(config)
    spec = spec.for_sequences(int(directory.manifest.options["max_seq_len"]))
    kinds = _kinds(architecture.program(spec))
    return {
        source: Place(
            param.name, begin, shape, order, _multipliers(param, begin, shape, order),
            frozenset(kinds.get(param.name, ())), param.product is not None,
        )
        for param in architecture.params(spec)
        for source, begin, shape, order in _sources(param)
    }  # fmt: skip


def _multipliers(
    param: Param, begin: int, shape: tuple[int, ...], order: RowOrder | None
) -> NDArray[np.float32] | None:
    if not param.factors:
        return None
    height = shape[0] if order is None else len(row_order(shape[0], order))
    return row_factors(param)[begin : begin + height]


def _kinds(program: Program) -> Mapping[str, set[OpKind]]:
    found: dict[str, set[OpKind]] = {}
    for op in program.ops:
        for name in op.weights:
            found.setdefault(name, set()).add(op.kind)
    return found


def _sources(param: Param) -> Iterator[tuple[str, int, tuple[int, ...], RowOrder | None]]:
    """Yields each source with its shape and order, and the row of the parameter where it begins."""
    begin = 0
    orders = param.orders or (None,) * len(param.sources)
    for source, shape, order in zip(param.sources, param.source_shapes, orders, strict=True):
        yield source, begin, shape, order
        begin += shape[0]


def _problems(adapter: Adapter, places: Mapping[str, Place]) -> Iterator[str]:
    for name in sorted(adapter.replaced):
        yield f"it replaces all of {name}, which engines do not support at run time; {MERGE}"
    for name, change in sorted(adapter.changes.items()):
        place = places.get(name)
        if place is None:
            yield f"it changes {name}, but the engine has no such matrix"
        elif others := [word for kind, word in IS_NOT_ADAPTED.items() if kind in place.kinds]:
            yield f"it changes {name}, {others[0]}, which engines do not support at run time; {MERGE}"
        elif place.is_factor:
            yield f"it changes {name}, which is part of a product in the engine; {MERGE}"
        elif place.shape != change.shape:
            yield f"{name} has the shape {list(place.shape)} in the engine, but {list(change.shape)} in the adapter"
        elif change.magnitude is not None:
            yield f"{name} is changed by DoRA, which engines do not support at run time; {MERGE}"
        elif len(change.down) > MAX_RANK:
            yield f"{name} has rank {len(change.down)}; at run time, at most {MAX_RANK} is supported; {MERGE}"


def _part(change: LowRank, place: Place, dtype: str, factors: Factors, name: str) -> AdapterPart:
    """The part in the engine's row order, multiplied by the scale and by the factors of its matrices."""
    values = np.dtype(FLOATS[dtype].values)
    up = change.up.astype(np.float32) * np.float32(change.scale)
    up = up if place.order is None else up[row_order(len(up), place.order)]
    up = up if place.multipliers is None else up * place.multipliers[:, None]
    down = change.down.astype(np.float32)
    if (rows := factors.rows.get(place.param)) is not None:
        up = up * rows[place.begin : place.begin + len(up), None]
    if (columns := factors.columns.get(place.param)) is not None:
        down = down * columns
    with np.errstate(over="ignore"):
        down, up = down.astype(values), up.astype(values)
    if not all(np.isfinite(each.astype(np.float32)).all() for each in (down, up)):
        raise CheckpointError(
            f"{name} does not fit {dtype} (a value overflows); build the engine with --dtype bfloat16"
        )
    return AdapterPart(PartShape(place.param, place.begin, len(up), down.shape[1], len(down)), down, up)
