"""Checkpoint -> engine directory. The one function behind `llmserve build`."""

from __future__ import annotations

import errno
import json
import logging
import platform
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmserve import __version__
from llmserve.builder.config import engine_config
from llmserve.builder.digest import engine_digest, tensor_digest
from llmserve.builder.equalization import Equalization, Load, equalize, names_read
from llmserve.builder.options import BuildOptions
from llmserve.builder.output import check_replaceable, staged_directory
from llmserve.builder.progress import Progress, SilentProgress
from llmserve.builder.quantization import quantized_params
from llmserve.builder.resolve import ResolvedBuild, resolve
from llmserve.builder.selftest import make_selftest
from llmserve.builder.targets.base import CompileJob, Target
from llmserve.checkpoint.plan import WeightPlan
from llmserve.checkpoint.reader import Checkpoint
from llmserve.engine.artifact import (
    CACHE_FILE,
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    HF_CONFIG_FILE,
    MANIFEST_FILE,
    PROGRAM_FILE,
    SELFTEST_FILE,
    TOKENIZER_FILES,
    hash_file,
)
from llmserve.engine.manifest import FileRecord, Manifest, Source
from llmserve.errors import InvalidArgument, ResourceExhausted, Unsupported, raise_problems

logger = logging.getLogger(__name__)
SPARE_DISK_BYTES = 32 * 2**20  # beside the engine file: self-test, tokenizer


def build_engine(
    checkpoint_dir: Path,
    output_dir: Path,
    options: BuildOptions,
    *,
    progress: Progress | None = None,
    target: Target | None = None,
) -> Manifest:
    """Compile `checkpoint_dir` into `output_dir`, which appears complete or not at all.

    An engine that is already there is replaced; anything else there is refused (`AlreadyExists`). What can be wrong
    with checkpoint and options is found before a weight is read (`CheckpointError`, `RecipeError`, `Unsupported`).
    Holds about one tensor in memory. `target` overrides the one that `options` names.
    """
    check_replaceable(output_dir)
    with Checkpoint.open(checkpoint_dir) as checkpoint:
        build = resolve(checkpoint, options, target=target)
        raise_problems(
            Unsupported, f"this machine cannot build for {build.target.name}", build.target.machine_problems()
        )
        for note in build.notes:
            logger.warning("%s", note)
        try:
            with staged_directory(output_dir) as directory:
                _check_disk_space(directory, build)
                return _write(checkpoint, build, directory, progress or SilentProgress(), output_dir)
        except OSError as error:
            failure = ResourceExhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else InvalidArgument
            raise failure(f"the build of {output_dir} failed: {error}") from error


class CanonicalWeights:
    """Parameters in the engine's dtype, each hashed when it is first loaded."""

    def __init__(self, weights: WeightPlan, dtype: str) -> None:
        self._weights = weights
        self._dtype = dtype
        self.digests: dict[str, str] = {}

    def load(self, name: str) -> NDArray[Any]:
        array = self._weights.load(name, self._dtype)
        if name not in self.digests:
            self.digests[name] = tensor_digest(array)
        return array


def _write(
    checkpoint: Checkpoint, build: ResolvedBuild, directory: Path, progress: Progress, earlier: Path
) -> Manifest:
    sizes = [(checkpoint.folder / name).stat().st_size for name in checkpoint.file_names]
    progress.phase("hash the checkpoint", sum(sizes))
    digest = checkpoint.digest(progress.advance)
    source = Source(digest, build.spec.architecture, checkpoint.file_names, checkpoint.rounded)
    weights = CanonicalWeights(build.weights, build.options.dtype)
    equalization = _equalize(build, weights.load, progress)
    load = equalization.apply(weights.load)
    progress.phase("compile", build.engine_bytes)
    job = CompileJob(build.program, build.params, build.options, load, progress.advance, earlier)
    device = {**build.target.compile(job, directory), **equalization.facts}
    assert weights.digests.keys() == {param.name for param in build.params}, "the target left a parameter out"
    build.target.tune(directory, earlier, progress)
    if build.target.has_selftest:
        progress.phase("self-test", _weight_bytes(build))
        selftest = make_selftest(build.program, build.params, build.options, load, advance=progress.advance)
        selftest.save(directory / SELFTEST_FILE)
    if not (directory / CONFIG_FILE).exists():
        _write_json(directory / CONFIG_FILE, engine_config(build.spec, build.program, build.options))
    (directory / PROGRAM_FILE).write_text(f"{build.program}\n")
    _copy_pipeline_files(checkpoint, directory, build.tokenizer_code.files)
    manifest = Manifest(
        engine_digest=engine_digest(build.program, build.options, {**weights.digests, **equalization.digests}),
        target=build.target.name,
        device=device,
        source=source,
        options=build.options.as_dict(),
        tensors=weights.digests,
        files=_file_records(directory, progress),
        tools={"llmserve": __version__, "numpy": np.__version__, "python": platform.python_version()},
    )
    (directory / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def _equalize(build: ResolvedBuild, load: Load, progress: Progress) -> Equalization:
    quantized = quantized_params(build.program, build.params, build.options)
    if not quantized or not build.target.rounds_activations:
        return Equalization({}, {})
    sizes = {param.name: build.options.itemsize * param.num_elements for param in build.params}
    progress.phase("equalize", sum(sizes[name] for name in names_read(build.program, quantized)))
    return equalize(build.program, quantized, load, progress.advance)


def _copy_pipeline_files(checkpoint: Checkpoint, directory: Path, code: Sequence[str]) -> None:
    """What turns text into ids and back, so that the engine directory needs no checkpoint beside it.

    `code` is data here, for Python models that have transformers run it.
    """
    kept = (*TOKENIZER_FILES, GENERATION_CONFIG_FILE, *code)
    names = {name: name for name in kept} | {"config.json": HF_CONFIG_FILE}
    for name, copied_name in names.items():
        if (content := checkpoint.text_file(name)) is not None:
            (directory / copied_name).write_bytes(content)


def _file_records(directory: Path, progress: Progress) -> dict[str, FileRecord]:
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.name != CACHE_FILE)
    progress.phase("seal", sum(file.stat().st_size for file in files))
    return {
        file.relative_to(directory).as_posix(): FileRecord(
            file.stat().st_size, hash_file(file, partial(progress.advance, file.name))
        )
        for file in files
    }


def _weight_bytes(build: ResolvedBuild) -> int:
    return build.options.itemsize * sum(param.num_elements for param in build.params)


def _check_disk_space(directory: Path, build: ResolvedBuild) -> None:
    needed = build.engine_bytes + SPARE_DISK_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ResourceExhausted(
            f"the engine needs {needed / 2**20:.0f} MiB, {directory.parent} has {free / 2**20:.0f} MiB free; "
            f"free some space or choose another --output-dir"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
