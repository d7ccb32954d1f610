"""The interface between the builder and a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from llmserve.builder.calibration.feedback import Shares, with_feedback
from llmserve.builder.options import BuildOptions
from llmserve.builder.pieces import Each, Weight, one_by_one
from llmserve.builder.quantization import WeightPart, quantized_params
from llmserve.errors import Unsupported
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import NumberFormat, WeightFormat
from llmserve.models.spec import Param
from llmserve.progress import Progress

COMPUTES = "computes_sha256"  # device fact: what else determines the engine's results, if anything


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Everything a target needs to write its engine files."""

    program: Program
    params: Sequence[Param]
    options: BuildOptions  # max_seq_len resolved, never 0
    # parameter name -> weight in `options.dtype` (bfloat16 is ml_dtypes.bfloat16), or float32 where it was equalized
    weight: Callable[[str], Weight]
    advance: Callable[[str, int], None]  # progress: (what, bytes written since the last call)
    earlier: Path | None = None  # the engine directory that this build will replace, if any
    each: Each = one_by_one
    shares: Mapping[str, Shares] = field(default_factory=dict)  # parameter -> statistics of its inputs, if known
    threads: int = 1  # workers, for steps that are not done piece by piece
    parts: Mapping[str, Sequence[WeightPart]] | None = None  # rounded parameters; None: determined by the options

    @property
    def quantized(self) -> Mapping[str, Sequence[WeightPart]]:
        """Parameters that are rounded to few bits, and how."""
        parts = quantized_params(self.program, self.params, self.options) if self.parts is None else self.parts
        return with_feedback(parts, self.shares)

    def load(self, name: str) -> NDArray[Any]:
        """The whole weight, as an array."""
        return self.weight(name)[:]


class Network(NamedTuple):
    """The part of a build that follows from a checkpoint's config and the options, without weights."""

    program: Program
    params: Sequence[Param]
    options: BuildOptions  # max_seq_len resolved, never 0


def no_kernels(target: str) -> Unsupported:
    return Unsupported(f"engines for {target} have no kernels to compile; leave out --kernels-only")


def unknown_ops(program: Program, known: Mapping[OpKind, Collection[str]]) -> list[str]:
    """Names of op kinds and attributes that a target does not support: ignoring one would compute something else."""
    kinds = [f"op {op.kind.value}" for op in program.ops if op.kind not in known]
    attributes = [
        f"{name} of {op.kind.value}: {op.attrs[name]}"
        for op in program.ops
        for name in op.attrs
        if op.kind in known and name not in known[op.kind]
    ]
    return list(dict.fromkeys(kinds + attributes))


def quantization_problems(options: BuildOptions, formats: Iterable[WeightFormat]) -> list[str]:
    """`formats`: the weight formats that a target supports."""
    names = [format.name for format in formats]
    if options.quantization in ("", *names):
        return []
    return [f"quantization {options.quantization} is not known; use {' or '.join(names)}"]


class Target(Protocol):
    """A target, for one checkpoint. Its module has `make_target(spec, config)`; the registry names the module."""

    name: str
    times_tactics: bool  # whether `tune` can measure anything
    has_selftest: bool  # its arithmetic is llmserve's, so the reference can verify the engine
    # Whether it rounds activations if weights are quantized: then outliers are moved into weights first, and
    # `CompileJob.quantized` says how weights are rounded.
    rounds_activations: bool
    rounds_tables: bool  # whether it looks up rows in a quantized head that is also the embedding

    def problems(self, program: Program, params: Sequence[Param], options: BuildOptions) -> list[str]:
        """Returns why this network cannot be compiled with these options, with advice; empty if it can."""
        ...

    def notes(self, options: BuildOptions) -> list[str]:
        """Notes for the user about these options; none of them is a problem."""
        ...

    def machine_problems(self, options: BuildOptions) -> list[str]:
        """Returns why this machine cannot build for the target, with advice. A plan does not check this."""
        ...

    def engine_bytes(self, network: Network, parts: Mapping[str, Sequence[WeightPart]]) -> int:
        """Size of the engine files, for the plan and the progress bar. `parts`: parameters that are rounded."""
        ...

    def cache_format(self, options: BuildOptions) -> NumberFormat:
        """The format of keys and values, for the plan and the self-test."""
        ...

    def kv_bytes_per_token(self, program: Program, options: BuildOptions) -> int:
        """Bytes of all layers together, for the plan."""
        ...

    def kv_bytes_of(self, program: Program, options: BuildOptions, num_tokens: int) -> int:
        """Bytes of a sequence of so many tokens, in whole blocks, for the plan."""
        ...

    def available_bytes(self) -> int:
        """Memory that an engine could use on this machine now, for the plan; 0 if unknown."""
        ...

    def read_bytes_per_s(self) -> float:
        """How fast this machine reads that memory, measured now; 0: a plan omits this machine."""
        ...

    def compile(self, job: CompileJob, directory: Path) -> Mapping[str, Any]:
        """Write the engine's files into `directory`; return device facts for the manifest. The fact named COMPUTES is
        part of the engine digest.

        Opens each parameter once and holds at most one at a time. A config.json that it writes is kept.
        """
        ...

    def compile_kernels(self, network: Network, output: Path, progress: Progress, threads: int) -> str:
        """Write to a file what `compile` compiles, for machines without a compiler. Returns a short description.

        Raises Unsupported for a target whose engines contain no kernels.
        """
        ...

    def tune(self, directory: Path, earlier: Path, progress: Progress) -> None:
        """Measure the fastest choices for this machine and store them in `directory`; no result may depend on them.

        `earlier`: the engine directory that this build will replace, if any.
        """
        ...
