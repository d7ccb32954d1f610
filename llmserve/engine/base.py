"""The two seams of the engine layer.

`Engine` is what the serving side sees, whoever batches. `Runner` is what our own scheduler drives: one planned step
on one device. An engine that batches inside itself implements `Engine` directly; the CPU engine is `InflightEngine`
over a runner.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from llmserve.core import Allowance, GenerateRequest, Logits, Tenant, TokenEvent
from llmserve.scheduler.plan import ChunkScores, HiddenRows, StepPlan
from llmserve.scheduler.settings import NO_WINDOWS, SchedulerConfig, SchedulerSettings, WindowedLayers

if TYPE_CHECKING:
    from llmserve.engine.adapters.sealed import SealedAdapter  # with number formats, which clients do without


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Fixed facts of a runner that the scheduler plans with."""

    vocab_size: int
    block_size: int  # tokens per KV block
    num_blocks: int
    max_num_tokens: int  # token budget of one step
    max_batch_size: int  # chunks in one step
    max_seq_len: int  # prompt + output of one sequence
    weight_bytes: int = 0  # of memory that maps a file, and looks free to whoever asks the system
    block_bytes: int = 0  # of each KV block; those that were never used look free, too
    num_states: int = 0  # slots for states of sequences; 0: the network has none
    state_bytes: int = 0  # of each
    gpu_bytes: int = 0  # allocated for good on a GPU
    pinned_bytes: int = 0  # and of the host, that it copies from and to
    output_width: int = 0  # of what it makes of whole sequences; 0: it chooses tokens
    needs_whole: bool = False  # all tokens of a sequence must be in one step
    hidden_width: int = 0  # of a hidden row, which it reads beside each token (`StepPlan.hidden`)
    windowed_layers: WindowedLayers = NO_WINDOWS  # whose blocks have tables of their own

    def num_whole(self, num_blocks: int) -> int:
        """How many blocks with all layers take the memory of these, each of which may have a part of the layers."""
        return num_blocks // (1 + self.windowed_layers.num_tables)

    @property
    def longest_fitting(self) -> int:
        """Tokens of the longest sequence that the pool has room for."""
        layers = self.windowed_layers
        num_left = self.num_blocks - layers.num_blocks_for(self.max_seq_len, self.block_size)
        return max(num_left, self.num_whole(self.num_blocks)) * self.block_size

    @property
    def fitting(self) -> RunnerInfo:
        """No sequence is longer than the pool has room for. An answer's last token is not in it."""
        longest = self.longest_fitting + (0 if self.output_width else 1)
        return self if longest >= self.max_seq_len else replace(self, max_seq_len=longest)

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks that take as much memory as a state: between two that are kept, so that these take no more."""
        return max(1, -(-self.state_bytes // max(1, self.block_bytes * (1 + self.windowed_layers.num_tables))))

    def promised_bytes(self, num_free_blocks: int, num_free_states: int) -> int:
        """Of the host's memory, that look free and are not. A GPU's pool is taken whole, and none of the host's."""
        pool = 0 if self.gpu_bytes else num_free_blocks * self.block_bytes + num_free_states * self.state_bytes
        return self.weight_bytes + pool

    def scheduler_config(self, settings: SchedulerSettings) -> SchedulerConfig:
        """What a scheduler plans with. Keys and values that depend on what comes later are of use to nobody else."""
        if self.needs_whole:
            settings = replace(settings, enable_block_reuse=False)
        return SchedulerConfig(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_tokens=self.max_num_tokens,
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            settings=settings,
            needs_whole=self.needs_whole,
            num_states=self.num_states,
            checkpoint_blocks=self.checkpoint_blocks,
            windowed_layers=self.windowed_layers,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and log-probs: one per sample, in the order of the chunks and, in a chunk, of its tokens."""

    tokens: Sequence[int]
    log_probs: Sequence[float]  # 0.0 where it is not asked for
    scores: Mapping[int, ChunkScores] = field(default_factory=dict)  # chunk index -> what else it asked for
    hidden: HiddenRows | None = None  # of all tokens of the step, where the runner hands them out

    @property
    def logits(self) -> Mapping[int, Logits]:
        """Of the chunks that asked for logits: [tokens, vocabulary]."""
        return {index: scores.logits for index, scores in self.scores.items() if scores.logits is not None}


class PendingStep(Protocol):
    """A step that was begun."""

    def result(self) -> StepResult:
        """Waits for it. To be called once, in the order in which steps were begun."""
        ...


class Runner(Protocol):
    """Executes one step at a time; called from one thread only."""

    @property
    def info(self) -> RunnerInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class BlockRunner(Runner, Protocol):
    """One whose KV blocks can be taken out and put back, and likewise states of sequences. Not during a step."""

    def read_block(self, block: int) -> bytes: ...

    def write_block(self, block: int, content: bytes) -> None: ...

    def read_state(self, state: int) -> bytes: ...

    def write_state(self, state: int, content: bytes) -> None: ...


class Packed(Protocol):
    """An adapter as a runner loads it."""

    @property
    def num_bytes(self) -> int:
        """Of memory, as long as it is loaded."""
        ...


@runtime_checkable
class AdapterRunner(Runner, Protocol):
    """One whose chunks may name an adapter by its slot, from 1 on."""

    def packed(self, adapter: SealedAdapter) -> Packed:
        """The adapter as `load_adapter` takes it, all of it read; in any thread. EngineFileError: it does not fit."""
        ...

    def load_adapter(self, slot: int, packed: Any) -> None:
        """Not during a step, as `unload_adapter`."""
        ...

    def unload_adapter(self, slot: int) -> None: ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """One that can begin a step before the last one's tokens are known."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step. Where the one before it is still pending, tokens that it chooses may be UNSEEN here."""
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client may want to know about the engine that answers."""

    name: str
    target: str  # by its name in the registry
    architecture: str
    dtype: str
    digest: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_beam_width: int = 1
    pooling: str = ""  # EMBEDDINGS or SCORES, which it makes of whole texts; empty: it makes tokens
    output_width: int = 0  # of such
    scores_with_sigmoid: bool = False
    kernels: str = ""  # that compute here; with the same ones equal requests get equal tokens. Empty: no such promise


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics. Field names follow TensorRT-LLM's IterationStats where one exists."""

    iteration: int = 0
    num_waiting_requests: int = 0
    num_active_requests: int = 0  # waiting + running
    max_num_active_requests: int = 0
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0  # preempted, waiting to be recomputed
    num_ctx_tokens: int = 0
    tokens_per_block: int = 0
    max_num_blocks: int = 0  # of the KV cache; each as large as its tokens are with all layers, likewise the next two
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    micro_batch_id: int = 0
    gpu_mem_usage: int = 0  # bytes
    pinned_mem_usage: int = 0  # bytes of the host that GPUs copy from
    total_ctx_tokens: int | None = None  # computed since the start, of prompts and of what was preempted; None: unknown
    total_gen_tokens: int | None = None  # sampled since the start; None: unknown
    total_drafted_tokens: int | None = None  # by speculation since the start; None: unknown
    total_accepted_tokens: int | None = None  # of these, drawn
    total_stored_blocks: int | None = None  # KV blocks written to files since the start; None: there are none
    total_restored_blocks: int | None = None  # and read from there
    max_num_states: int = 0  # slots for states of sequences, where the network has states
    free_num_states: int = 0  # that no running sequence has
    promised_bytes: int = 0  # of the host's memory, that look free and are not: weights, and blocks not in use
    total_preemptions: int | None = None  # since the start; None: unknown
    num_failed_replicas: int = 0  # of an engine on several devices
    num_restarts: int = 0  # of an engine in a process of its own


class Engine(Protocol):
    """Tokens for prompts, many at once. Closing the returned generator is the only way to cancel."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Validate now (`InvalidArgument`), enqueue on first pull (`ResourceExhausted` when the queue is full)."""
        ...

    def stats(self) -> EngineStats: ...

    def healthy(self) -> bool: ...

    def close(self) -> None:
        """Stop the step loop; open streams end with `Unavailable`. Idempotent."""
        ...


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine whose requests may name an adapter by its digest."""

    def add_adapter(self, adapter: SealedAdapter) -> None:
        """Requests may name it from here on. Reads all of it, so not on an event loop.

        Raises Unsupported where the engine takes none, EngineFileError for one that is damaged or of another base.
        """
        ...

    def remove_adapter(self, digest: str) -> None:
        """Once for every `add_adapter`. Requests under way keep it."""
        ...


@runtime_checkable
class MeteringEngine(Engine, Protocol):
    """An engine that holds tenants to their limits."""

    def allowance(self, tenant: Tenant) -> Allowance:
        """What is left to a tenant. Cheap; from any thread."""
        ...
