"""Who comes next, and who gives way, when requests of several tenants compete.

A tenant's **usage** is the larger of its parts of the batch's places and of the blocks, over its weight. Used evenly,
an engine gives every tenant that has something to do the **fair level**: one over the sum of their weights.

* The tenant with the least usage goes first: its prompts are computed before others', and its next request starts.
  Among equals the one that had fewer tokens computed for its weight. Who comes back after a pause starts level with
  the others: what was not used is not saved up.
* Who is above the fair level gives way, its last sequences first, when a tenant that would not exceed it cannot start:
  under every policy; and when another's answer outgrows its blocks. Its first sequence stays, unless that alone takes
  more blocks than are fair; after `MAX_DISPLACED` times it stays even so, and everything ends.
* Whose part is less than one place, as a batch job's beside live requests, has its prompts computed in pieces: beside
  the tokens of others a step is no longer than one token for each place.
* A full queue still takes what a tenant's share of it has room for.

With one tenant none of this decides anything.
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
    """Whether a queue that others have filled owes a tenant room for more. `counts`: sequences of each, everywhere."""
    weights = sum(other.weight for other in counts.keys() | {tenant})
    room = (config.settings.max_queue_size + config.max_num_running) * tenant.weight / weights
    return weights > tenant.weight and counts.get(tenant, 0) + num_arriving <= room


@dataclass(slots=True)
class _Account:
    num_sequences: int = 0  # waiting or running
    served: float = 0.0  # tokens computed, over the weight


class Fairness:
    def __init__(self, config: SchedulerConfig, claim: Callable[[Sequence], int]) -> None:
        """`claim`: blocks that a sequence has, or has been promised."""
        self._config = config
        self._claim = claim
        self._accounts: dict[Tenant, _Account] = {}  # of those with sequences

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
        """The lower, the earlier. Of every tenant that has sequences."""
        usages = self.usages(running)
        return {tenant: (usages[tenant], account.served) for tenant, account in self._accounts.items()}

    def usages(self, running: Iterable[Sequence]) -> Mapping[Tenant, float]:
        """0 for who has nothing running."""
        places: Counter[Tenant] = Counter()
        blocks: Counter[Tenant] = Counter()
        for sequence in running:
            places[sequence.tenant] += 1
            blocks[sequence.tenant] += self._claim(sequence)
        return Counter({tenant: self._usage(tenant, places[tenant], blocks[tenant]) for tenant in places})

    def may_displace(self, newcomer: Sequence, running: Collection[Sequence]) -> bool:
        """Whether its tenant stays within what is fair; a first sequence needs no more than fair blocks."""
        own = [sequence for sequence in running if sequence.tenant == newcomer.tenant]
        places = len(own) + 1 if own else 0
        return self._usage(newcomer.tenant, places, sum(map(self._claim, (*own, newcomer)))) <= self.fair_level

    def displaceable(self, newcomer: Sequence, running: Collection[Sequence], place: Place) -> Iterator[Sequence]:
        """Who gives way, in this order; all of them leave nobody above the fair level who could be asked for more."""
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
        """Before the prompt of one whose part is less than a place, in a step with others."""
        if newcomer.is_decoding or not self.is_contested:
            return
        least = 1 / (self._config.max_num_running * self.fair_level)
        if newcomer.tenant.weight < least <= max((other.tenant.weight for other in outline.sequences), default=0):
            outline.shorten(self._config.max_num_running)

    def num_sequences(self) -> Mapping[Tenant, int]:
        """Waiting or running, of every tenant that has some."""
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
