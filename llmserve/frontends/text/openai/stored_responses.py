"""Stores responses for a limited time, so that a later request can continue them. They are only in memory.

A response belongs to the API key that requested it; other keys cannot see it. If the store is full, the key with the
most bytes loses its oldest response.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmserve.frontends.http.json_fields import Json, encode_json

MAX_AGE_S = 3600.0
MAX_BYTES = 64 << 20  # of all responses


@dataclass(frozen=True, slots=True)
class StoredResponse:
    document: Mapping[str, Json]
    messages: Sequence[Mapping[str, Any]]  # of the conversation, including its answer
    num_bytes: int
    expires: float


class StoredResponses:
    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`most`: maximum number of responses; 0 stores none."""
        self._most = most
        self._clock = clock
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}  # by owner; the oldest first

    @property
    def keeps(self) -> bool:
        return self._most > 0

    def put(self, owner: str, document: Mapping[str, Json], messages: Sequence[Mapping[str, Any]]) -> None:
        num_bytes = len(encode_json({"document": dict(document), "messages": list(messages)}))
        kept = self._kept.setdefault(owner, OrderedDict())
        kept[str(document["id"])] = StoredResponse(document, messages, num_bytes, self._clock() + MAX_AGE_S)
        self._forget()

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        self._forget()
        return self._kept.get(owner, OrderedDict()).get(response_id)

    def delete(self, owner: str, response_id: str) -> None:
        self._kept.get(owner, OrderedDict()).pop(response_id, None)

    def _forget(self) -> None:
        now = self._clock()
        for kept in self._kept.values():
            while kept and next(iter(kept.values())).expires <= now:
                kept.popitem(last=False)
        sizes = {owner: sum(one.num_bytes for one in kept.values()) for owner, kept in self._kept.items()}
        while sum(map(len, self._kept.values())) > self._most or sum(sizes.values()) > MAX_BYTES:
            owner = max(sizes, key=lambda owner: sizes[owner])
            _, gone = self._kept[owner].popitem(last=False)
            sizes[owner] -= gone.num_bytes
        self._kept = {owner: kept for owner, kept in self._kept.items() if kept}
