"""Limits the number of waiting requests, which the library does not."""

from __future__ import annotations

from llmserve.engine.base import EngineInfo
from llmserve.errors import InvalidArgument, ResourceExhausted


def check_room(num_arriving: int, num_open: int, info: EngineInfo, max_queue_size: int) -> None:
    """`ResourceExhausted` if batch and queue have no room for so many more sequences; `InvalidArgument` if never."""
    room = max_queue_size + info.max_batch_size
    if not max_queue_size or num_open + num_arriving <= room:
        return
    if num_arriving > room:
        raise InvalidArgument(
            f"the request asks for {num_arriving} answers, but batch and queue have room for {room} (max_queue_size is "
            f"{max_queue_size}); ask for fewer at a time"
        )
    raise ResourceExhausted(
        f"the queue is full: {num_open} sequences are open, this request adds {num_arriving}, and max_queue_size is "
        f"{max_queue_size}; try again later"
    )
