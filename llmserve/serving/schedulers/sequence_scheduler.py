"""The scheduler of models with state: all requests of a sequence run on one instance, one after the other.

A cancelled request ends its sequence: the model's state is then not what the next request expects. A request that the
model answers with an error does not.

With `iterative_sequence`, every request is a sequence of its own, and the model may run it again and again: requests
join and leave batches between executions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import Cancelled
from llmserve.serving.backend import ModelInstance
from llmserve.serving.instruments.model_statistics import ModelStatistics, RequestTiming
from llmserve.serving.schedulers.base import Rejected, SequenceError
from llmserve.serving.schedulers.batching import batch_key
from llmserve.serving.schedulers.controls import Controls, ImplicitState, StateSpec
from llmserve.serving.schedulers.instances import schedule_instances, usable
from llmserve.serving.schedulers.queued_request import QueuedRequest, answer_queued
from llmserve.serving.schedulers.request_sequences import RequestSequence, SequenceTable, Slot
from llmserve.serving.schedulers.sequence_strategies import make_strategy
from llmserve.serving.schedulers.shared import NOTHING_SHARED, SharedResources
from llmserve.serving.signature import ModelSignature, request_label
from llmserve.serving.tensor_data import zero_tensor
from llmserve.serving.types import InferRequest, InferResponse


class SequenceScheduler:
    def __init__(
        self,
        config: ModelConfig,
        signature: ModelSignature,
        instances: Sequence[ModelInstance],
        *,
        statistics: ModelStatistics,
        states: Sequence[StateSpec] = (),
        shared: SharedResources = NOTHING_SHARED,
    ) -> None:
        batching = config.sequence_batching
        self._name = config.name
        self._signature = signature
        self._strategy = make_strategy(config)
        self._idle_s = batching.max_sequence_idle_microseconds / 1e6
        self._preserves_ordering = batching.oldest.preserve_ordering
        self._is_iterative = batching.iterative_sequence
        self._numbers = itertools.count(1)  # ids for requests without a sequence id
        self._controls = Controls(config)
        self._state = ImplicitState(config.name, states)
        # Iterative requests that ran together should do so again, so all are back before the next batch is chosen.
        self._wake = self._pump_soon if self._is_iterative else self._pump
        self._instances = schedule_instances(config, instances, statistics, shared, self._wake)
        self._table = SequenceTable(len(self._instances), self._strategy.num_slots)
        self._sequences: dict[QueuedRequest, RequestSequence] = {}
        self._last_finished: asyncio.Future[None] | None = None
        self._delay_timer: asyncio.TimerHandle | None = None
        self._soon: asyncio.Handle | None = None
        self._stopped = False

    @property
    def num_pending(self) -> int:
        return sum(len(sequence.waiting) for sequence in self._table)

    def infer(self, request: InferRequest, timing: RequestTiming) -> AsyncGenerator[InferResponse, None]:
        reschedule = self._reschedule if self._is_iterative else None
        return answer_queued(partial(self._admit, request, timing), self._finish, self._receive, reschedule)

    async def stop(self) -> None:
        self._stopped = True
        for sequence in list(self._table):
            for queued in sequence.waiting:
                queued.refuse(f"model '{self._name}' is being unloaded")
            sequence.waiting.clear()
            self._end(sequence)
        for instance in self._instances:
            instance.leave()

    def _admit(self, request: InferRequest, timing: RequestTiming) -> QueuedRequest:
        if self._stopped:
            raise Rejected(f"{request_label(request)}model '{self._name}' is being unloaded")
        if self._is_iterative and not request.sequence_id:
            request = replace(request, sequence_id=self._unused_number(request.tenant.name), sequence_start=True)
        sequence = self._sequence_of(request)
        key = batch_key(self._signature, request)
        queued = QueuedRequest(request, timing, level=1, batch_size=1, key=key, arrival_ns=time.monotonic_ns())
        self._sequences[queued] = sequence
        sequence.waiting.append(queued)
        if sequence.idle_timer is not None:
            sequence.idle_timer.cancel()
        if request.sequence_end or self._is_iterative:
            self._table.close(sequence)
        self._wake()
        return queued

    def _unused_number(self, tenant: str) -> int:
        return next(number for number in self._numbers if self._table.find((tenant, number)) is None)

    def _reschedule(self, queued: QueuedRequest) -> None:
        """The model asks for the request again: it waits again, in the same slot."""
        sequence = self._sequences[queued]
        sequence.running = None
        queued.request = replace(queued.request, sequence_start=False, sequence_end=False)
        queued.arrival_ns = time.monotonic_ns()
        queued.end_turn()
        if self._stopped:
            queued.refuse(f"model '{self._name}' is being unloaded")
        else:
            sequence.waiting.append(queued)
        queued.leave_batch()
        self._wake()

    def _sequence_of(self, request: InferRequest) -> RequestSequence:
        """The sequence that the request continues or starts. A second START continues in the slot of the first."""
        sequence_id = request.sequence_id
        if not sequence_id:
            raise SequenceError(
                f"inference request to model '{self._name}' must specify a non-zero or non-empty correlation ID"
            )
        if self._signature.batch_size(request) > 1:
            raise SequenceError(
                f"inference request to model '{self._name}' must specify batch-size 1 due to requirements of sequence "
                "batcher"
            )
        self._controls.check(sequence_id)
        sequence = self._table.find(request.tenant_sequence_id)
        if sequence is not None:
            return sequence
        if not request.sequence_start:
            raise SequenceError(
                f"inference request for sequence {sequence_id} to model '{self._name}' must specify the START flag on "
                "the first request of the sequence"
            )
        return self._table.open(request.tenant_sequence_id)

    def _pump_soon(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Give slots to sequences and batches to idle instances, and set a timer for later batches."""
        self._soon = None
        if self._delay_timer is not None:
            self._delay_timer.cancel()
            self._delay_timer = None
        healthy = usable(self._instances)
        self._table.fill_slots(lambda number: self._instances[number] in healthy)
        now_ns = time.monotonic_ns()
        waits = [self._pump_instance(number, now_ns) for number in range(len(self._instances))]
        if wait_until_ns := min(filter(None, waits), default=0):
            self._delay_timer = asyncio.get_running_loop().call_later((wait_until_ns - now_ns) / 1e9, self._pump)

    def _pump_instance(self, number: int, now_ns: int) -> int:
        """Run the batches that are due on one instance. Returns the time until which it waits, or 0."""
        instance, slots = self._instances[number], self._table.instances[number]
        while instance.is_idle:
            queued_requests, wait_until_ns = self._strategy.choose(slots, now_ns)
            if not queued_requests:
                instance.decline()
                return wait_until_ns
            gone = [queued for queued in queued_requests if queued.cancelled]
            for queued in gone:
                self._break(self._sequences[queued])
            if not gone:
                if not instance.take():
                    break
                self._run(number, queued_requests)
        return 0

    def _run(self, number: int, queued_requests: list[QueuedRequest]) -> None:
        slots = self._table.instances[number]
        by_slot: dict[int, QueuedRequest] = {}
        for queued in queued_requests:
            sequence = self._sequences[queued]
            assert sequence.slot is not None
            assert sequence.slot in slots
            sequence.running = sequence.waiting.popleft()
            by_slot[sequence.slot.number] = queued
            if self._preserves_ordering:
                queued.previous = self._last_finished
                queued.finished = self._last_finished = asyncio.get_running_loop().create_future()
        requests = {place: self._prepared(queued) for place, queued in by_slot.items()}
        if self._strategy.keeps_places:
            nothing = self._nothing_like(queued_requests[0].request)
            places = range(1 + max(slot.number for slot in slots if _is_taken(slot)))
            batch = [requests.get(place, nothing) for place in places]
            self._instances[number].run(list(by_slot.values()), batch, places=list(by_slot))
        else:
            self._instances[number].run(list(by_slot.values()), list(requests.values()))

    def _prepared(self, queued: QueuedRequest) -> InferRequest:
        """The request as the model gets it, with control inputs and state."""
        request, sequence = queued.request, self._sequences[queued]
        if request.sequence_start:
            sequence.state = self._state.initial()
        return request.with_inputs({**request.inputs, **self._controls.of(request), **sequence.state})

    def _nothing_like(self, request: InferRequest) -> InferRequest:
        """A request that fills an empty slot."""
        zeros = {name: zero_tensor(name, given.datatype, given.shape) for name, given in request.inputs.items()}
        inputs = {**zeros, **self._controls.of_nothing(), **self._state.initial()}
        return InferRequest(request.model_name, inputs, request.model_version)

    def _receive(self, queued: QueuedRequest, response: InferResponse) -> InferResponse:
        if response.error is None:
            sequence = self._sequences[queued]
            sequence.state = self._state.updated(sequence.state, response.outputs)
        return response

    def _finish(self, queued: QueuedRequest) -> None:
        """The request is over for the scheduler: answered, cancelled or refused."""
        sequence = self._sequences.pop(queued)
        if sequence.running is queued:
            sequence.running = None
        elif queued in sequence.waiting:
            sequence.waiting.remove(queued)
        queued.end_turn()
        if not queued.is_over:
            self._break(sequence)
        elif sequence.is_idle:
            self._rest(sequence)
        queued.leave_batch()
        self._wake()

    def _rest(self, sequence: RequestSequence) -> None:
        """No request of the sequence waits or runs: end it if it is closed, else start its idle timer."""
        if sequence.idle_timer is not None:
            sequence.idle_timer.cancel()
        if not sequence.is_open:
            self._end(sequence)
        else:
            sequence.idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._expire, sequence)

    def _expire(self, sequence: RequestSequence) -> None:
        if sequence.is_idle:
            self._end(sequence)
            self._pump()

    def _break(self, sequence: RequestSequence) -> None:
        """End a sequence of which a request was cancelled."""
        for queued in sequence.waiting:
            label = request_label(queued.request)
            queued.fail(Cancelled(f"{label}a request of sequence {queued.request.sequence_id} has been cancelled"))
        sequence.waiting.clear()
        self._end(sequence)

    def _end(self, sequence: RequestSequence) -> None:
        if sequence.idle_timer is not None:
            sequence.idle_timer.cancel()
        self._table.close(sequence)
        if sequence.is_idle:
            self._table.release(sequence)


def _is_taken(slot: Slot) -> bool:
    return slot.sequence is not None
