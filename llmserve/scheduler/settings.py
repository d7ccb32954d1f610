"""Settings of the scheduler: `SchedulerSettings` are the operator's, `SchedulerConfig` adds the runner's limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from llmserve.errors import InvalidArgument, ResourceExhausted, raise_problems
from llmserve.scheduler.blocks import BlockListener
from llmserve.scheduler.drafts.drafter import Speculation
from llmserve.scheduler.step_costs import RowTimes


class Policy(Enum):
    """When a waiting sequence may start. The names are TensorRT-LLM's (`batch_scheduler_policy`)."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"  # if all blocks that it may need can be reserved: never preempted
    MAX_UTILIZATION = "max_utilization"  # if its known tokens fit now: may be preempted and computed again


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The operator's choices.

    `priority_step` converts priorities to places in the queue: a sequence with a priority higher by one goes before the
    last `priority_step` arrivals, but not before older ones. So the number of times that a request is overtaken is
    bounded.
    """

    policy: Policy = Policy.GUARANTEED_NO_EVICT
    enable_block_reuse: bool | None = None  # None: the engine decides; it reuses blocks wherever that is correct
    max_queue_size: int = 1000  # waiting sequences beyond those that fit into the batch; 0: no limit
    priority_step: int = 1000
    speculation: Speculation = Speculation.ALL
    block_listener: BlockListener | None = field(default=None, compare=False, repr=False)

    @property
    def reuses_blocks(self) -> bool:
        return self.enable_block_reuse is not False

    def __post_init__(self) -> None:
        rules = [
            (self.max_queue_size >= 0, f"max_queue_size must not be negative, got {self.max_queue_size}"),
            (self.priority_step >= 1, f"priority_step must be at least 1, got {self.priority_step}"),
        ]
        raise_problems(InvalidArgument, "scheduler settings", [text for holds, text in rules if not holds])


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers that read only the last `window` positions. Their blocks are in `num_tables` separate tables."""

    window: int = 0
    num_tables: int = 0  # 0: all layers share one table per sequence
    least_chunk: int = 64  # tokens that a sequence can always compute next: enough for an efficient step

    def first_read(self, position: int) -> int:
        """The first position that a token at `position`, or a later one, reads."""
        return max(0, position - self.window + 1)

    def num_blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Blocks that a sequence of `num_tokens` is promised in these tables at a time."""
        all_blocks, of_window = -(-num_tokens // block_size), self.window - 1 + self.least_chunk
        return self.num_tables * min(all_blocks, -(-of_window // block_size) + 1)


NO_WINDOWS = WindowedLayers()


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The runner's limits and the operator's settings: everything that a `Scheduler` needs."""

    block_size: int
    num_blocks: int
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    num_states: int = 0  # slots for states; 0: the network has none
    checkpoint_blocks: int = 1  # number of blocks between two states that are kept for other sequences
    needs_whole: bool = False  # all tokens of a sequence must be in one step; they fit into `max_num_tokens`
    windowed_layers: WindowedLayers = NO_WINDOWS
    row_times: RowTimes = ()  # time of all layers by number of rows; empty: unknown

    @property
    def max_num_running(self) -> int:
        """Limited so that every running sequence gets a token in every step, and a state if the network has states."""
        return min(self.max_batch_size, self.max_num_tokens, self.num_states or self.max_batch_size)

    def check_fits(self, num_arriving: int) -> None:
        """Raise `InvalidArgument` if the queue can never hold that many sequences at once."""
        limit = self.settings.max_queue_size
        if limit and num_arriving > limit + self.max_num_running:
            raise InvalidArgument(
                f"the request asks for {num_arriving} answers, but batch and queue have room for "
                f"{limit + self.max_num_running} (max_queue_size is {limit}); ask for fewer at a time"
            )

    def check_room(self, num_arriving: int, *, num_waiting: int, num_running: int) -> None:
        """Raise `ResourceExhausted` if the queue has no room for a request of `num_arriving` sequences."""
        limit = self.settings.max_queue_size
        num_starting = max(0, self.max_num_running - num_running)
        if limit and num_waiting + num_arriving > limit + num_starting:
            raise ResourceExhausted(
                f"the queue is full: {num_waiting} sequences wait, {num_arriving} more arrive, and max_queue_size is "
                f"{limit}; try again later"
            )

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_windowed_blocks_for(self, num_tokens: int) -> int:
        """Additional blocks, in the tables of layers with a window."""
        return self.windowed_layers.num_blocks_for(num_tokens, self.block_size)
