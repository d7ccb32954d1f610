"""The result of a build, and the engine's capacity on this machine, computed in advance: `llmserve build --dry-run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import stored_names
from llmserve.builder.resolve import ResolvedBuild, resolve
from llmserve.builder.targets.base import Target
from llmserve.checkpoint.adapters.adapted import open_checkpoint
from llmserve.checkpoint.name import checkpoint_name
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import WeightFormat

KV_MEMORY_FRACTION = 0.9  # of the memory that the engine leaves free, the server's default
SEQUENCE_LENGTHS = (512, 2048, 8192, 32768)


@dataclass(frozen=True, slots=True)
class BuildPlan:
    checkpoint: str
    architecture: str
    options: BuildOptions  # max_seq_len resolved
    program: Program
    num_parameters: int
    engine_bytes: int
    cache_dtype: str  # format of keys and values
    kv_bytes_per_token: int
    sequence_bytes: Mapping[int, int]  # length of a sequence -> its KV cache
    weight_bytes: int  # parameters that a step multiplies, whichever experts it chooses
    idle_expert_bytes: int  # of these, in experts that a token does not choose
    available_bytes: int  # memory that an engine may use here now
    read_bytes_per_s: float  # 0: unknown; the plan then omits this machine
    notes: tuple[str, ...]

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes that one decode step of one sequence reads."""
        return self.weight_bytes - self.idle_expert_bytes

    @property
    def kv_pool_tokens(self) -> int:
        """Tokens of KV cache that fit next to the engine."""
        return max(0, int(self._free_bytes / self.kv_bytes_per_token))

    @property
    def _free_bytes(self) -> float:
        return KV_MEMORY_FRACTION * (self.available_bytes - self.engine_bytes)

    @property
    def sequences_that_fit(self) -> dict[int, int]:
        """Sequence length -> how many such sequences the KV cache holds at once."""
        sizes = {length: size + self.program.state_bytes for length, size in self.sequence_bytes.items()}
        return {length: max(0, int(self._free_bytes / size)) for length, size in sizes.items()}

    def tokens_per_s_bound(self, context: int) -> float:
        """Upper bound at batch 1: every step reads the weights and the cache of `context` tokens once."""
        state_bytes = 2 * self.program.state_bytes  # read and written
        return self.read_bytes_per_s / (self.weight_bytes_per_step + context * self.kv_bytes_per_token + state_bytes)

    def rows(self) -> list[tuple[str, str]]:
        """(label, value) rows for display."""
        options = self.options
        return [
            ("checkpoint", f"{self.checkpoint} ({self.architecture})"),
            ("target", f"{options.target}, {options.dtype}{options.quantization and '+' + options.quantization}, "
                       f"KV cache in {self.cache_dtype}"),
            ("parameters", f"{self.num_parameters:,}"),
            ("engine file", f"{self.engine_bytes / 2**20:,.1f} MiB"),
            ("limits", f"{options.max_batch_size} sequences and {options.max_num_tokens:,} tokens per step, "
                       f"{options.max_seq_len:,} tokens per sequence, {options.tokens_per_block} tokens per KV block"),
            ("KV cache", f"{self.kv_bytes_per_token / 2**10:,.1f} KiB per token"),
            *self._state_rows(),
            *(self._machine_rows() if self.read_bytes_per_s else ()),
            *(("note", note) for note in self.notes),
        ]  # fmt: skip

    def _state_rows(self) -> list[tuple[str, str]]:
        if not self.program.state_bytes:
            return []
        size = f"{self.program.state_bytes / 2**20:,.1f} MiB per sequence, and per prefix that is kept for reuse"
        return [("states", size)]

    def _machine_rows(self) -> list[tuple[str, str]]:
        fits = ", ".join(f"{count:,} of {length:,} tokens" for length, count in self.sequences_that_fit.items())
        empty, full = (_rate(self.tokens_per_s_bound(context)) for context in (0, self.options.max_seq_len - 1))
        rows = [
            ("memory here", f"{self.available_bytes / 2**30:,.1f} GiB available to this process"),
            ("sequences that fit", fits),
            ("memory read", f"{self.read_bytes_per_s / 1e9:,.1f} GB/s (measured now, with all cores)"),
            ("bound at batch 1", f"{empty} tokens/s with an empty KV cache, {full} with a full one: "
                                 f"each token reads weights and cache once"),
        ]  # fmt: skip
        return rows[:-1] if self.program.pools else rows


def _rate(per_s: float) -> str:
    """A rate with decimals if they matter, such as 2.3 tokens per second for a large network."""
    return f"{per_s:,.{2 if per_s < 10 else 1 if per_s < 100 else 0}f}"


def plan_build(
    checkpoint_dir: Path,
    options: BuildOptions,
    *,
    target: Target | None = None,
    measure: Callable[[], float] | None = None,
) -> BuildPlan:
    """Check everything that `build_engine` would check before it reads a weight, and count. Writes nothing.

    `target` and `measure` override the target that `options` names and its `read_bytes_per_s`.
    """
    with open_checkpoint(checkpoint_dir, options.adapter) as checkpoint:
        build = resolve(checkpoint, options, target=target)
        return BuildPlan(
            checkpoint=checkpoint_name(checkpoint_dir),
            architecture=build.spec.architecture,
            options=build.options,
            program=build.program,
            num_parameters=sum(param.num_elements for param in build.params),
            engine_bytes=build.engine_bytes,
            cache_dtype=build.target.cache_format(build.options).name,
            kv_bytes_per_token=build.target.kv_bytes_per_token(build.program, build.options),
            sequence_bytes=_sequence_bytes(build),
            weight_bytes=build.engine_bytes - _looked_up_bytes(build),
            idle_expert_bytes=_idle_expert_bytes(build),
            available_bytes=build.target.available_bytes(),
            read_bytes_per_s=(measure or build.target.read_bytes_per_s)(),
            notes=_notes(build),
        )


def _sequence_bytes(build: ResolvedBuild) -> Mapping[int, int]:
    limit = build.options.max_seq_len
    lengths = [*(length for length in SEQUENCE_LENGTHS if length < limit), limit]
    return {length: build.target.kv_bytes_of(build.program, build.options, length) for length in lengths}


def _looked_up_bytes(build: ResolvedBuild) -> int:
    """Bytes of tables from which a step reads only one row per token."""
    stored = stored_names(build.params, build.quantized)
    tables = {stored[op.weights[0]] for op in build.program.ops if op.kind is OpKind.EMBED}
    read_whole = {stored[name] for op in build.program.ops if op.kind is not OpKind.EMBED for name in op.weights}
    looked_up = {param.name: param.num_elements for param in build.params if param.name in tables - read_whole}
    return sum(_format_of(build, name).num_bytes(count) for name, count in looked_up.items())


def _idle_expert_bytes(build: ResolvedBuild) -> int:
    sizes, total = {param.name: param.num_elements for param in build.params}, 0.0
    for op in build.program.ops:
        if op.kind is OpKind.EXPERTS:
            idle = 1 - op.number("experts_per_token") / op.number("num_experts")
            for name in op.weights:
                total += idle * _format_of(build, name).num_bytes(sizes[name])
    return int(total)


def _format_of(build: ResolvedBuild, name: str) -> WeightFormat:
    parts = build.quantized.get(name)
    return parts[0].scheme.format if parts else build.options.floats


def _notes(build: ResolvedBuild) -> tuple[str, ...]:
    options = build.options
    notes = [*build.notes, *build.target.machine_problems(build.options)]
    if options.max_batch_size > options.max_num_tokens:
        notes.append(
            f"a step has at most max_num_tokens={options.max_num_tokens} tokens, "
            f"so max_batch_size={options.max_batch_size} can never be reached"
        )
    return tuple(notes)
