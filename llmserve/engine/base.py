"""The two interfaces of the engine layer.

`Engine` is the interface for serving, whichever component batches. `Runner` executes steps of our own scheduler: one
planned step on one device. An engine that batches by itself implements `Engine` directly; the CPU engine is an
`InflightEngine` over a runner.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from llmserve.core import Allowance, GenerateRequest, Logits, Tenant, TokenEvent
from llmserve.scheduler.plan import ChunkScores, HiddenRows, StepPlan
from llmserve.scheduler.settings import NO_WINDOWS, SchedulerConfig, SchedulerSettings, WindowedLayers
from llmserve.scheduler.step_costs import RowTimes

if TYPE_CHECKING:
    from llmserve.engine.adapters.sealed import SealedAdapter  # imports number formats, which clients do not need


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Fixed facts of a runner that the scheduler plans with."""

    vocab_size: int
    block_size: int  # tokens per KV block
    num_blocks: int
    max_num_tokens: int  # token budget of one step
    max_batch_size: int  # chunks per step
    max_seq_len: int  # prompt and output of one sequence
    weight_bytes: int = 0  # of memory that maps a file, which the system reports as free
    block_bytes: int = 0  # of each KV block; blocks that were never used are also reported as free
    num_states: int = 0  # slots for states of sequences; 0: the network has none
    state_bytes: int = 0  # of each state
    gpu_bytes: int = 0  # permanently allocated on a GPU
    pinned_bytes: int = 0  # in host memory, for copies to and from a GPU
    output_width: int = 0  # numbers that it returns for whole sequences; 0: it generates tokens
    needs_whole: bool = False  # all tokens of a sequence must be in one step
    hidden_width: int = 0  # of a hidden row, which it reads for each token (`StepPlan.hidden`)
    draft_vocab_size: int = 0  # tokens that its head has, by their index (`engine.draft_engine`); 0: all
    windowed_layers: WindowedLayers = NO_WINDOWS  # layers whose blocks have their own tables
    row_times: RowTimes = ()  # time of all layers by number of rows; empty: unknown

    @property
    def num_choices(self) -> int:
        """The number of tokens that its head has."""
        return self.draft_vocab_size or self.vocab_size

    def num_whole(self, num_blocks: int) -> int:
        """How many blocks with all layers need the memory of these, which may have only part of the layers."""
        return num_blocks // (1 + self.windowed_layers.num_tables)

    @property
    def longest_fitting(self) -> int:
        """Tokens of the longest sequence that fits in the pool."""
        layers = self.windowed_layers
        num_left = self.num_blocks - layers.num_blocks_for(self.max_seq_len, self.block_size)
        return max(num_left, self.num_whole(self.num_blocks)) * self.block_size

    @property
    def fitting(self) -> RunnerInfo:
        """A copy whose `max_seq_len` fits in the pool. The last token of an answer is not in the pool."""
        longest = self.longest_fitting + (0 if self.output_width else 1)
        return self if longest >= self.max_seq_len else replace(self, max_seq_len=longest)

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks with the memory of one state: states are kept at least that far apart, to take no more."""
        return max(1, -(-self.state_bytes // max(1, self.block_bytes * (1 + self.windowed_layers.num_tables))))

    def promised_bytes(self, num_free_blocks: int, num_free_states: int) -> int:
        """Host memory that is reported as free but is reserved. None for a GPU's pool."""
        pool = 0 if self.gpu_bytes else num_free_blocks * self.block_bytes + num_free_states * self.state_bytes
        return self.weight_bytes + pool

    def scheduler_config(self, settings: SchedulerSettings) -> SchedulerConfig:
        """Settings for a scheduler. Keys and values that depend on later tokens cannot be shared."""
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
            row_times=self.row_times,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens and log-probs: one per sample, in the order of the chunks and of their tokens."""

    tokens: Sequence[int]
    log_probs: Sequence[float]  # 0.0 if not requested
    scores: Mapping[int, ChunkScores] = field(default_factory=dict)  # chunk index -> its other results
    hidden: HiddenRows | None = None  # of all tokens of the step, if the runner returns them

    @property
    def logits(self) -> Mapping[int, Logits]:
        """Logits of the chunks that requested them: [tokens, vocabulary]."""
        return {index: scores.logits for index, scores in self.scores.items() if scores.logits is not None}


class PendingStep(Protocol):
    """A step that has started."""

    def result(self) -> StepResult:
        """Wait for it. Call it once per step, in the order in which steps started."""
        ...


class Runner(Protocol):
    """Executes one step at a time; called from one thread only."""

    @property
    def info(self) -> RunnerInfo: ...

    def step(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


@runtime_checkable
class BlockRunner(Runner, Protocol):
    """A runner whose KV blocks and states of sequences can be read and written. Not during a step."""

    def read_block(self, block: int) -> bytes: ...

    def write_block(self, block: int, content: bytes) -> None: ...

    def read_state(self, state: int) -> bytes: ...

    def write_state(self, state: int, content: bytes) -> None: ...


class Packed(Protocol):
    """An adapter in the form that a runner loads."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes while it is loaded."""
        ...


@runtime_checkable
class AdapterRunner(Runner, Protocol):
    """A runner whose chunks may select an adapter by its slot, from 1 on."""

    def packed(self, adapter: SealedAdapter) -> Packed:
        """The adapter for `load_adapter`, completely read; from any thread. EngineFileError: it does not fit."""
        ...

    def load_adapter(self, slot: int, packed: Any) -> None:
        """Loads an adapter into a slot. Not during a step; the same applies to `unload_adapter`."""
        ...

    def unload_adapter(self, slot: int) -> None: ...


@runtime_checkable
class PipelinedRunner(Runner, Protocol):
    """A runner that can start a step before the previous step's tokens are known."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. While the previous step is pending, its tokens may be UNSEEN here."""
        ...


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about an engine for clients."""

    name: str
    target: str  # its name in the registry
    architecture: str
    dtype: str
    digest: str
    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_beam_width: int = 1
    pooling: str = ""  # EMBEDDINGS or SCORES of whole texts; empty: it generates tokens
    output_width: int = 0  # of embeddings or scores
    scores_with_sigmoid: bool = False
    kernels: str = ""  # kernels in use; with the same kernels, equal requests get equal tokens. Empty: not guaranteed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for metrics. Field names follow TensorRT-LLM's IterationStats where one exists."""

    iteration: int = 0
    num_waiting_requests: int = 0
    num_active_requests: int = 0  # waiting and running
    max_num_active_requests: int = 0
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0  # preempted, waiting for recomputation
    num_ctx_tokens: int = 0
    tokens_per_block: int = 0
    max_num_blocks: int = 0  # of the KV cache, counted with all layers, as are the next two
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    micro_batch_id: int = 0
    gpu_mem_usage: int = 0  # bytes
    pinned_mem_usage: int = 0  # host memory that GPUs copy from
    total_ctx_tokens: int | None = None  # computed since the start, for prompts and after preemption; None: unknown
    total_gen_tokens: int | None = None  # sampled since the start; None: unknown
    total_drafted_tokens: int | None = None  # drafted since the start; None: unknown
    total_accepted_tokens: int | None = None  # of these, accepted
    total_stored_blocks: int | None = None  # KV blocks written to files since the start; None: no files
    total_restored_blocks: int | None = None  # KV blocks read from files
    max_num_states: int = 0  # slots for states of sequences, if the network has states
    free_num_states: int = 0  # slots without a running sequence
    promised_bytes: int = 0  # host memory that is reported as free but is reserved: weights, and unused blocks
    total_preemptions: int | None = None  # since the start; None: unknown
    num_failed_replicas: int = 0  # if the engine runs on several devices
    num_restarts: int = 0  # if the engine runs in its own process


class Engine(Protocol):
    """Generates tokens for many prompts at once. Closing the returned generator is the only way to cancel."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """Validates at once (`InvalidArgument`); enqueues at the first pull (`ResourceExhausted`: queue full)."""
        ...

    def stats(self) -> EngineStats: ...

    def healthy(self) -> bool: ...

    def close(self) -> None:
        """Stop the step loop; open streams end with `Unavailable`. May be called again."""
        ...


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine whose requests may select an adapter by its digest."""

    def add_adapter(self, adapter: SealedAdapter) -> None:
        """Add an adapter for later requests. Reads all files, so do not call it on an event loop.

        Raises Unsupported if the engine does not support adapters, and EngineFileError if this one is damaged or has
        another base.
        """
        ...

    def remove_adapter(self, digest: str) -> None:
        """Call it once for every `add_adapter`. Running requests keep the adapter."""
        ...


@runtime_checkable
class MeteringEngine(Engine, Protocol):
    """An engine that enforces limits of tenants."""

    def allowance(self, tenant: Tenant) -> Allowance:
        """Returns the tenant's remaining limits. Cheap; callable from any thread."""
        ...
