"""Checkpoint -> engine directory. The one function behind `llmserve build`."""

from __future__ import annotations

import errno
import json
import logging
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from llmserve import __version__
from llmserve.builder.background import Advance, Background
from llmserve.builder.config import engine_config
from llmserve.builder.digest import engine_digest, tensor_digest
from llmserve.builder.options import BuildOptions
from llmserve.builder.output import check_replaceable, flush, staged_directory
from llmserve.builder.phases import expected_phases
from llmserve.builder.pieces import Cores, Each
from llmserve.builder.quantization import num_matrices
from llmserve.builder.resolve import ResolvedBuild, resolve, resolve_network
from llmserve.builder.rounding import prepare_rounding
from llmserve.builder.selftest import make_selftest
from llmserve.builder.targets.base import COMPUTES, CompileJob, Target
from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.reader import Checkpoint, read_config
from llmserve.core import TOKENIZER_FILES
from llmserve.engine.directory.artifact import (
    CACHE_FILE,
    CONFIG_FILE,
    DRAFT_VOCABULARY_FILE,
    GENERATION_CONFIG_FILE,
    HF_CONFIG_FILE,
    MANIFEST_FILE,
    PROGRAM_FILE,
    SELFTEST_FILE,
    hash_file,
)
from llmserve.engine.directory.build_time import BuildTime
from llmserve.engine.directory.factors import FACTORS_FILE, Factors
from llmserve.engine.directory.manifest import FileRecord, Manifest, Source
from llmserve.engine.machine.cores import num_threads
from llmserve.engine.machine.description import machine_name
from llmserve.errors import InvalidArgument, ResourceExhausted, Unsupported, raise_problems
from llmserve.progress import Progress, SilentProgress

logger = logging.getLogger(__name__)
SPARE_DISK_BYTES = 32 * 2**20  # next to the engine file: self-test, tokenizer


def build_engine(
    checkpoint_dir: Path,
    output_dir: Path,
    options: BuildOptions,
    *,
    progress: Progress | None = None,
    target: Target | None = None,
    threads: int = 0,
) -> Manifest:
    """Compile `checkpoint_dir` into `output_dir`, which appears complete or not at all.

    An existing engine there is replaced; anything else is refused (`AlreadyExists`). Problems with the checkpoint and
    the options are found before a weight is read (`CheckpointError`, `RecipeError`, `Unsupported`). Only a few pieces
    of tensors are in memory at a time. `target` overrides the one in `options`. `threads` 0 means one per core; the
    number changes no byte.
    """
    began = time.perf_counter()
    check_replaceable(output_dir)
    threads = num_threads(threads)
    with open_checkpoint(checkpoint_dir, options.adapter) as checkpoint:
        build = resolve(checkpoint, options, target=target)
        _require_machine(build.target, build.options)
        for note in build.notes:
            logger.warning("%s", note)
        try:
            with staged_directory(output_dir) as directory, Background() as background, Cores(threads) as cores:
                _check_disk_space(directory, build)
                work = _Work(progress or SilentProgress(), cores.each, background, threads)
                with threadpool_limits(1, "blas"):  # the pieces use the cores, and no sum depends on their number
                    manifest = _write(checkpoint, build, directory, work, output_dir)
                BuildTime(round(time.perf_counter() - began, 3), machine_name()).save(directory)
                return manifest
        except OSError as error:
            failure = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidArgument
            raise failure(f"the build of {output_dir} failed: {error}") from error


def build_kernels(
    checkpoint_dir: Path, output: Path, options: BuildOptions, *, progress: Progress | None = None,
    target: Target | None = None, threads: int = 0,
) -> str:  # fmt: skip
    """Compile the kernels of an engine of `checkpoint_dir` into the file `output`, which `--kernels` uses where no
    compiler is installed. Reads only the checkpoint's configuration. Returns a short description of the kernels.

    Raises as `build_engine` does, and `Unsupported` for a target whose engines contain no kernels.
    """
    config = read_config(checkpoint_dir)
    if options.adapter:
        with open_checkpoint(checkpoint_dir, options.adapter) as adapted:
            config = adapted.config
    network, made_for = resolve_network(config, options, target=target)
    _require_machine(made_for, network.options)
    return made_for.compile_kernels(network, output, progress or SilentProgress(), num_threads(threads))


def _require_machine(target: Target, options: BuildOptions) -> None:
    problems = target.machine_problems(options)
    raise_problems(Unsupported, f"this machine cannot build for {target.name}", problems)


@dataclass(frozen=True, slots=True)
class _Work:
    """How a build runs its work and reports progress."""

    progress: Progress
    each: Each
    background: Background
    threads: int


def _write(checkpoint: Checkpoint, build: ResolvedBuild, directory: Path, work: _Work, earlier: Path) -> Manifest:
    progress = work.progress
    progress.expect(expected_phases(build))
    hashed = work.background.start(partial(_digests, checkpoint, build))
    rounding = prepare_rounding(build, progress, work.each)
    progress.phase("compile", build.engine_bytes)
    job = CompileJob(
        build.program, build.params, build.options, rounding.load, progress.advance, earlier, work.each,
        rounding.shares, work.threads, build.quantized,
    )  # fmt: skip
    device = {**build.target.compile(job, directory), **rounding.equalization.facts}
    device |= {"kept_params": num_matrices(build.params, build.kept)} if build.kept else {}
    if not (directory / CONFIG_FILE).exists():
        _write_json(directory / CONFIG_FILE, engine_config(build.spec, build.program, build.options))
    if build.target.rounds_activations and build.is_rounded:
        Factors(rounding.equalization.rows, rounding.equalization.columns).save(directory / FACTORS_FILE)
    if tokens := build.program.draft_vocabulary:
        np.save(directory / DRAFT_VOCABULARY_FILE, np.array(tokens, np.int32))
    (directory / PROGRAM_FILE).write_text(f"{build.program}\n")
    _copy_pipeline_files(checkpoint, directory, build.tokenizer_code.files)
    progress.phase("hash the checkpoint", _checkpoint_bytes(checkpoint) + build.hashed_bytes)
    source, tensors = hashed.result(progress)  # done before the target measures times
    build.target.tune(directory, earlier, progress)
    written = _files(directory)
    records = work.background.start(partial(_file_records, directory, written))
    loss = None
    if build.target.has_selftest:
        progress.phase("self-test", build.weight_bytes)
        test, loss = make_selftest(job, cache=build.target.cache_format(build.options), passage=build.passage)
        test.save(directory / SELFTEST_FILE)
    progress.phase("seal", sum(file.stat().st_size for file in written))
    late = [file for file in _files(directory) if file not in written]
    files = {**records.result(progress), **_file_records(directory, late)}
    as_stored = {f"{name}.integers": build.kept_as(name) for name in build.kept}
    as_stored |= {f"{name}.rows": "looked up" for name in build.looked_up}
    as_stored |= {"cache.heads": "mixed"} if build.target.cache_format(build.options).mixes_heads else {}
    as_stored |= {COMPUTES: str(device[COMPUTES])} if COMPUTES in device else {}
    manifest = Manifest(
        engine_digest=engine_digest(build.program, build.options, {**tensors, **rounding.digests, **as_stored}),
        target=build.target.name,
        device=device,
        source=source,
        options=build.options.as_dict(),
        tensors=tensors,
        files=dict(sorted(files.items())),
        tools={"llmserve": __version__, "numpy": np.__version__, "python": platform.python_version()},
        calibration=build.calibration.facts if build.calibration else None,
        loss=loss,
    )
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def _digests(checkpoint: Checkpoint, build: ResolvedBuild, advance: Advance) -> tuple[Source, dict[str, str]]:
    """Digests of the checkpoint's files, and of parameters in the engine's dtype, or float32 if integers are kept."""
    digest = checkpoint.digest(advance)
    source = Source(digest, build.spec.architecture, checkpoint.file_names, checkpoint.rounded)
    dtypes = {param.name: "float32" if param.name in build.kept else build.options.dtype for param in build.params}
    rows = ((name, build.weights.rows(name, dtype)) for name, dtype in dtypes.items())
    return source, {name: tensor_digest(weight, partial(advance, name)) for name, weight in rows}


def _copy_pipeline_files(checkpoint: Checkpoint, directory: Path, code: Sequence[str]) -> None:
    """Copy what converts text to ids and back, so that the engine directory does not need the checkpoint.

    `code` is only copied, for Python models that run it through transformers.
    """
    kept = (*TOKENIZER_FILES, GENERATION_CONFIG_FILE, *code)
    names = {name: name for name in kept} | {"config.json": HF_CONFIG_FILE}
    for name, copied_name in names.items():
        checkpoint.copy_text_file(name, directory / copied_name)


def _files(directory: Path) -> list[Path]:
    """The files that the manifest lists."""
    return sorted(file for file in directory.rglob("*") if file.is_file() and file.name != CACHE_FILE)


def _file_records(
    directory: Path, files: Sequence[Path], advance: Advance = lambda name, num_bytes: None
) -> dict[str, FileRecord]:
    """Hashes files and flushes them to disk, so that early ones need no waiting at the end."""
    records = {}
    for file in files:
        flush(file)
        sha256 = hash_file(file, partial(advance, file.name))
        records[file.relative_to(directory).as_posix()] = FileRecord(file.stat().st_size, sha256)
    return records


def _checkpoint_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.file(name).stat().st_size for name in checkpoint.file_names)


def _check_disk_space(directory: Path, build: ResolvedBuild) -> None:
    needed = build.engine_bytes + SPARE_DISK_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ResourceExhausted(
            f"the engine needs {needed / 2**20:.0f} MiB, but {directory.parent} has {free / 2**20:.0f} MiB free; "
            f"free some space or choose another --output-dir"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
