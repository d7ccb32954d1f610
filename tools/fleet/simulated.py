"""A fleet on Dynamo's simulator (`dynamo.replay`): its router, its batches, its prefix caches, in simulated time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.fleet.costs import StepCosts
from tools.fleet.traffic import BLOCK, Request, lines

ROUTERS = {"kv": "kv_router", "round-robin": "round_robin"}


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: its costs and limits."""

    costs: StepCosts
    max_batch_size: int
    max_num_tokens: int  # of one step
    kv_tokens: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class Outcome:
    first_token_s: float  # at the requested quantile, like the next field
    between_tokens_s: float
    within: float  # share of requests within both limits
    cached: float  # share of prompt tokens that were cached
    tokens_per_s: float
    seconds: float  # until the last answer ended


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for a request; `share` of the requests must meet them."""

    first_token_s: float
    between_tokens_s: float
    share: float = 0.95


class Change:
    """The number of replicas over time, for the simulator: [(second, replicas), ...], in order."""

    def __init__(self, plan: Sequence[tuple[float, int]]) -> None:
        self._plan = list(plan)

    def initial_tick_ms(self) -> float:
        return 1e3 * self._plan[0][0]

    def on_tick(self, snapshot: Mapping[str, Any]) -> dict[str, float | int | None]:
        _, replicas = self._plan.pop(0)
        next_ms = 1e3 * self._plan[0][0] if self._plan else None
        return {"target_prefill": None, "target_decode": replicas, "next_tick_ms": next_ms}


class Fleet:
    """Simulates the same requests on different numbers of replicas. `folder`: for the files that the simulator reads.
    `block`: tokens of a block of the requests."""

    def __init__(
        self, folder: Path, replica: Replica, requests: Sequence[Request], limits: Limits, *, block: int = BLOCK
    ) -> None:
        from dynamo._core import run_mocker_trace_replay  # `dynamo.replay` does not accept a scaling policy

        logging.getLogger("dynamo").setLevel(logging.WARNING)
        self._replay: Callable[..., Any] = run_mocker_trace_replay
        self._limits, self._block = limits, block
        self._trace, times = folder / "trace.jsonl", folder / "costs.npz"
        self._trace.write_text("\n".join(lines(requests)))
        replica.costs.write(times, replica.max_batch_size, replica.max_seq_len)
        self._engine = {
            "timing_model": {"type": "external", "provider": "dynamo_profile", "config": {"path": str(times)}},
            "num_gpu_blocks": replica.kv_tokens // BLOCK,
            "block_size": BLOCK,
            "max_num_seqs": replica.max_batch_size,
            "max_num_batched_tokens": replica.max_num_tokens,
        }

    def outcome(
        self, replicas: int, router: str = "kv", *, change: Sequence[tuple[float, int]] = (), starts_in_s: float = 0.0
    ) -> Outcome:
        """`change`: see `Change`; a new replica serves `starts_in_s` after it was requested."""
        engine: dict[str, Any] = {"engine": self._engine, "startup_time": starts_in_s or None}
        limits = self._limits
        told = self._replay(
            [str(self._trace)], extra_engine_args=engine, num_workers=replicas, router_mode=ROUTERS[router],
            trace_block_size=self._block,
            sla_ttft_ms=1e3 * limits.first_token_s, sla_itl_ms=1e3 * limits.between_tokens_s,
            scaling_policy=Change(change) if change else None,
        ).summary  # fmt: skip
        quantile = "median" if limits.share == 0.5 else f"p{round(100 * limits.share)}"
        return Outcome(
            told[f"{quantile}_ttft_ms"] / 1e3,
            told[f"{quantile}_itl_ms"] / 1e3,
            told["goodput_completed_requests"] / told["num_requests"],
            told["prefix_cache_reused_ratio"],
            told["output_throughput_tok_s"],
            told["duration_ms"] / 1e3,
        )

    def fewest(self, router: str = "kv", *, most: int = 2000) -> int | None:
        """The smallest number of replicas that meets the limits; None: more than `most` are needed."""

        def keeps(replicas: int) -> bool:
            return self.outcome(replicas, router).within >= self._limits.share

        high = 1
        while not keeps(high):
            if high == most:
                return None
            high = min(2 * high, most)
        low = high // 2  # not enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return high
