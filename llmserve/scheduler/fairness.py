"""Fair sharing between tenants: whose request starts next, and whose sequences are preempted.

A tenant's **usage** is its share of the batch or of the blocks, whichever is larger, divided by its weight. The **fair
level** is 1 / (sum of the weights of active tenants): the usage of every tenant if all get their fair share.

* The tenant with the lowest usage goes first: its prompts are computed first, and its next request starts. Ties go to
  the tenant with fewer computed tokens per weight. A tenant that returns after a pause starts level with the others:
  unused share is not saved up.
* A tenant above the fair level loses its newest sequences if a tenant below the level cannot start (under every
  policy), or if another tenant's answer needs more blocks. It keeps its oldest sequence, unless that alone takes more
  than the fair share of blocks. After `MAX_DISPLACED` preemptions it keeps that too, so that every sequence ends.
* If a tenant's share is less than one sequence, as for a batch job next to live requests, its prompts are computed in
  small chunks: in a step with other tenants' sequences, the step is at most `max_num_running` tokens long.
* A full queue still accepts requests within a tenant's share of it.

With one tenant, none of this has an effect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from llmserve.core import Tenant
from llmserve.scheduler.outline import Outline
from llmserve.scheduler.sequence import Sequence
from llmserve.scheduler.settings import SchedulerConfig

Place: TypeAlias = Callable[[Sequence], tuple[int, int]]
Rank: TypeAlias = tuple[float, float]

MAX_DISPLACED = 2


def has_queue_share(tenant: Tenant, num_arriving: int, counts: Mapping[Tenant, int], config: SchedulerConfig) -> bool:
    """Whether a tenant may still enter a full queue. `counts`: waiting and running sequences of each tenant."""
    weights = sum(other.weight for other in counts.keys() | {tenant})
    room = (config.settings.max_queue_size + config.max_num_running) * tenant.weight / weights
    return weights > tenant.weight and counts.get(tenant, 0) + num_arriving <= room


@dataclass(slots=True)
class _Account:
    num_sequences: int = 0  # waiting or running
    served: float = 0.0  # tokens computed, over the weight


class Fairness:
    def __init__(self, config: SchedulerConfig, claim: Callable[[Sequence], int]) -> None:
        """`claim`: returns the number of blocks that a sequence has or has been promised."""
        self._config = config
        self._claim = claim
        self._accounts: dict[Tenant, _Account] = {}  # tenants with sequences

    @property
    def is_contested(self) -> bool:
        return len(self._accounts) > 1

    @property
    def fair_level(self) -> float:
        return 1 / sum(tenant.weight for tenant in self._accounts)

    def arrive(self, tenant: Tenant) -> None:
        account = self._accounts.get(tenant)
        if account is None:
            least = min((other.served for other in self._accounts.values()), default=0.0)
            account = self._accounts[tenant] = _Account(served=least)
        account.num_sequences += 1

    def leave(self, tenant: Tenant) -> None:
        account = self._accounts[tenant]
        account.num_sequences -= 1
        if not account.num_sequences:
            del self._accounts[tenant]

    def serve(self, tenant: Tenant, num_tokens: int) -> None:
        self._accounts[tenant].served += num_tokens / tenant.weight

    def ranks(self, running: Iterable[Sequence]) -> Mapping[Tenant, Rank]:
        """Rank of every tenant with sequences; the lowest goes first."""
        usages = self.usages(running)
        return {tenant: (usages[tenant], account.served) for tenant, account in self._accounts.items()}

    def usages(self, running: Iterable[Sequence]) -> Mapping[Tenant, float]:
        """Usage of each tenant; 0 if it has nothing running."""
        places: Counter[Tenant] = Counter()
        blocks: Counter[Tenant] = Counter()
        for sequence in running:
            places[sequence.tenant] += 1
            blocks[sequence.tenant] += self._claim(sequence)
        return Counter({tenant: self._usage(tenant, places[tenant], blocks[tenant]) for tenant in places})

    def may_displace(self, newcomer: Sequence, running: Collection[Sequence]) -> bool:
        """Whether its tenant stays within the fair level. Only blocks count for a tenant's first sequence."""
        own = [sequence for sequence in running if sequence.tenant == newcomer.tenant]
        places = len(own) + 1 if own else 0
        return self._usage(newcomer.tenant, places, sum(map(self._claim, (*own, newcomer)))) <= self.fair_level

    def displaceable(self, newcomer: Sequence, running: Collection[Sequence], place: Place) -> Iterator[Sequence]:
        """Sequences to preempt, in order, until no other tenant that can give more is above the fair level."""
        level = self.fair_level
        left: dict[Tenant, list[Sequence]] = {}
        for sequence in sorted(running, key=place):
            if sequence.tenant != newcomer.tenant:
                left.setdefault(sequence.tenant, []).append(sequence)
        while left:
            usages = {tenant: self._usage_of(tenant, own) for tenant, own in left.items()}
            tenant = max(usages, key=lambda tenant: (usages[tenant], place(left[tenant][-1])))
            if usages[tenant] <= level:
                return
            own = left[tenant]
            if len(own) == 1 and not self._may_lose_all(tenant, own[0], level):
                del left[tenant]
                continue
            yield own.pop()
            if not own:
                del left[tenant]

    def shorten(self, outline: Outline, newcomer: Sequence) -> None:
        """Shorten the step before a prompt of a tenant whose share is less than one sequence, if others are in it."""
        if newcomer.is_decoding or not self.is_contested:
            return
        least = 1 / (self._config.max_num_running * self.fair_level)
        if newcomer.tenant.weight < least <= max((other.tenant.weight for other in outline.sequences), default=0):
            outline.shorten(self._config.max_num_running)

    def num_sequences(self) -> Mapping[Tenant, int]:
        """Waiting and running sequences of every tenant that has any."""
        return {tenant: account.num_sequences for tenant, account in self._accounts.items()}

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        counted = Counter(sequence.tenant for sequence in sequences)
        assert counted == self.num_sequences()

    def _may_lose_all(self, tenant: Tenant, sequence: Sequence, level: float) -> bool:
        takes_more = self._usage(tenant, 0, self._claim(sequence)) > level
        return takes_more and sequence.num_displaced < MAX_DISPLACED

    def _usage_of(self, tenant: Tenant, running: Collection[Sequence]) -> float:
        return self._usage(tenant, len(running), sum(map(self._claim, running)))

    def _usage(self, tenant: Tenant, num_places: int, num_blocks: int) -> float:
        config = self._config
        return max(num_places / config.max_num_running, num_blocks / config.num_blocks) / tenant.weight
