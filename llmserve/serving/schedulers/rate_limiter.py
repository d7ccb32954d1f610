"""`--rate-limit=execution_count`: instances of all models share named resources, and take turns by priority.

An instance that has work stages a claim. Claims are granted in the order of executions so far times priority, so that
priority 2 runs half as often as priority 1. A claim whose resources are not free blocks those behind it; otherwise an
instance that needs many could wait for ever. A CPU server is one device, so there is one pool of each resource.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmserve.errors import InvalidArgument, raise_problems

_MODES = ("off", "execution_count")


class Claim:
    """One instance's place in the limiter."""

    __slots__ = ("_limiter", "granted", "needs", "num_executions", "priority", "staged", "wake")

    def __init__(self, limiter: RateLimiter, needs: Mapping[str, int], priority: int, wake: Callable[[], None]) -> None:
        self._limiter = limiter
        self.needs = needs
        self.priority = priority
        self.wake = wake  # called on the loop after a claim that had to wait is granted
        self.num_executions = 0
        self.staged = False
        self.granted = False

    def take(self) -> bool:
        """Whether the instance may run now; if not, `wake` is called when it may."""
        if not self.granted:
            self._limiter.stage(self)
        return self.granted

    def give_back(self, *, has_run: bool) -> None:
        self.num_executions += has_run
        self._limiter.release(self)

    def leave(self) -> None:
        """The instance takes no more work. It returns what it holds when it is done."""
        self._limiter.leave(self)


class RateLimiter:
    """Grants the claims of instances. Call it on the event loop."""

    def __init__(self, limits: Mapping[str, int] | None = None) -> None:
        """`limits`: those of the command line; any other resource is as large as the largest need."""
        self._limits = dict(limits or {})
        self._claims: dict[Claim, None] = {}
        self._staged: dict[Claim, int] = {}  # claim -> when it was staged
        self._in_use: Counter[str] = Counter()
        self._order = count()

    def problems(self, config: ModelConfig) -> list[str]:
        """Why instances of a model could never run."""
        return [
            f'Resource count for "{name}" is limited to {self._limits[name]} which will prevent scheduling of one or '
            f"more model instances, the minimum required count is {needed}"
            for group in config.instance_group
            for name, needed in _needs(group).items()
            if needed > self._limits.get(name, needed)
        ]

    def join(self, group: ModelInstanceGroup, wake: Callable[[], None]) -> Claim:
        """A claim for one instance of the group."""
        claim = Claim(self, _needs(group), max(1, group.rate_limiter.priority), wake)
        self._claims[claim] = None
        return claim

    def leave(self, claim: Claim) -> None:
        self._claims.pop(claim, None)
        self._staged.pop(claim, None)
        self._grant()

    def stage(self, claim: Claim) -> None:
        self._staged.setdefault(claim, next(self._order))
        self._grant()

    def release(self, claim: Claim) -> None:
        assert claim.granted
        claim.granted = False
        self._in_use.subtract(claim.needs)
        asyncio.get_running_loop().call_soon(self._grant)  # later: the same instance may stage a claim again

    def _grant(self) -> None:
        while self._staged:
            claim = min(self._staged, key=lambda claim: (claim.num_executions * claim.priority, self._staged[claim]))
            if not all(self._in_use[name] + needed <= self._size(name) for name, needed in claim.needs.items()):
                return
            del self._staged[claim]
            claim.granted = True
            self._in_use.update(claim.needs)
            asyncio.get_running_loop().call_soon(claim.wake)

    def _size(self, name: str) -> int:
        largest = max((claim.needs.get(name, 0) for claim in self._claims), default=0)
        return self._limits.get(name, largest)


def _needs(group: ModelInstanceGroup) -> dict[str, int]:
    needs: Counter[str] = Counter()
    for resource in group.rate_limiter.resources:
        needs[resource.name] += resource.count
    return dict(needs)


def make_rate_limiter(mode: str, resources: Sequence[str]) -> RateLimiter | None:
    """The limiter for `--rate-limit` and `--rate-limit-resource NAME:COUNT[:DEVICE]`; None: no limits."""
    if mode not in _MODES:
        raise InvalidArgument(f"--rate-limit {mode}: expected {' or '.join(_MODES)}")
    limits: dict[str, int] = {}
    problems = []
    for text in resources:
        name, *numbers = text.split(":")
        if not name or len(numbers) not in (1, 2) or not all(part.isascii() and part.isdigit() for part in numbers):
            problems.append(f"{text}: expected NAME:COUNT or NAME:COUNT:DEVICE")
        elif len(numbers) == 2 and int(numbers[1]) != 0:
            problems.append(f"{text}: device {numbers[1]} does not exist; a CPU server has only device 0")
        else:
            limits[name] = max(int(numbers[0]), limits.get(name, 0))
    raise_problems(InvalidArgument, "--rate-limit-resource", problems)
    return RateLimiter(limits) if mode == "execution_count" else None
