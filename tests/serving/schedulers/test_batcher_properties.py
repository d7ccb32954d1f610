"""What holds for dynamic batches whatever comes: their size, their shapes, their order, and that nobody is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.serving.instruments.model_statistics import ModelStatistics
from llmserve.serving.schedulers.queued_scheduler import QueuedScheduler
from llmserve.serving.signature import ModelSignature
from tests.serving.instances import Client, Instance, ReleasingOne, settle
from tests.serving.models import identity_config

configs = st.builds(
    lambda size, preferred, delay_us, ordered: (
        f"max_batch_size: {size} dynamic_batching {{ "
        + " ".join(f"preferred_batch_size: {1 + wish % size}" for wish in preferred)
        + f" max_queue_delay_microseconds: {delay_us} preserve_ordering: {str(ordered).lower()} }}"
    ),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), max_size=2),
    st.sampled_from([0, 0, 500]),
    st.booleans(),
)
steps = st.lists(
    st.tuples(st.sampled_from(["send", "send", "send", "cancel", "go", "wait"]), st.integers(1, 2)), max_size=40
)


@settings(max_examples=100)
@given(configs, steps, st.integers(1, 3))
def test_laws_of_dynamic_batches(config: str, script: list[tuple[str, int]], num_instances: int) -> None:
    asyncio.run(play(config, script, num_instances))


async def play(text: str, script: list[tuple[str, int]], num_instances: int) -> None:
    config = text_format.Parse('name: "m"\n' + identity_config(text), ModelConfig())
    instances = [Instance() if index % 2 else ReleasingOne() for index in range(num_instances)]
    statistics = ModelStatistics("m", "1")
    client = Client(QueuedScheduler(config, ModelSignature(config), instances, statistics))
    width: dict[str, int] = {}
    for number, (what, argument) in enumerate(script):
        if what == "send":
            width[str(number)] = argument
            await client.send(str(number), width=argument)
        elif what == "cancel":
            waiting = [name for name, task in client.tasks.items() if not task.done()]
            if waiting:
                await client.cancel(waiting[argument % len(waiting)])
        elif what == "wait":
            await asyncio.sleep(0.0006)
        else:
            await answer(instances)
    while not all(task.done() for task in client.tasks.values()):
        await answer(instances)
        await asyncio.sleep(0.0002)
    check(client, instances, config, width)
    ran = Counter(name for instance in instances for batch in instance.batches for name in batch)
    assert all(times == 1 for times in ran.values())
    assert set(client.ended) <= set(ran)
    assert all(task.cancelled() or task.exception() is None for task in client.tasks.values())
    assert client.target.num_pending == 0


async def answer(instances: list[Instance]) -> None:
    """Everything that runs now is answered, and nothing that comes then."""
    for instance in instances:
        instance.gate.set()
    await settle()
    for instance in instances:
        instance.gate.clear()
        if isinstance(instance, ReleasingOne) and instance.batches:
            release, instance.release = instance.release, lambda: None
            release()
    await settle()


def check(client: Client, instances: list[Instance], config: ModelConfig, width: dict[str, int]) -> None:
    for instance in instances:
        for batch in instance.batches:
            assert 1 <= len(batch) <= config.max_batch_size
            assert len({width[name] for name in batch}) == 1
        assert in_order([name for batch in instance.batches for name in batch])
    if config.dynamic_batching.preserve_ordering:
        assert in_order(client.ended)


def in_order(names: list[str]) -> bool:
    return [int(name) for name in names] == sorted(int(name) for name in names)
