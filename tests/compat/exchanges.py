"""What went over the wire for a case, and how alike two servers' answers are: identical, of the same status, or worse.

A case compares what a client makes of an answer; here it is the answer itself: every header but those that frame it or
date it, every byte of the body, every field of a message.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from tools.servers import Endpoint, Exchange

Json: TypeAlias = Any
FRAMING = ("connection", "content-length", "date", "keep-alive", "transfer-encoding")
INFLATE: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
# where a file lies, which instance was free, how long something took, and when: of one run of one server
VARYING = (
    (re.compile(r"[^\s\"\\]*/model\.py\(\d+\)"), "model.py(..)"),
    (re.compile(r"'repeat_0_\d'"), "'repeat_0_?'"),
    (re.compile(r'(\\*"(?:count|ns|last_inference|inference_count|execution_count)\\*": ?\\*"?)\d+'), r"\g<1>0"),
)


class Likeness(Enum):
    IDENTICAL = "identical"
    SAME_STATUS = "same status"
    OTHER_STATUS = "another status, not worse"
    WORSE = "worse"


def keep(endpoint: Endpoint, exchange: Exchange) -> None:
    """One for each question: what is asked again and again until something has happened counts once."""
    if endpoint.exchanges is None:
        return
    again = [each for each in endpoint.exchanges if each["asked"] == exchange["asked"] and each == exchange]
    if not again:
        endpoint.exchanges.append(exchange)


def http_exchange(asked: str, answer: http.client.HTTPResponse, data: bytes) -> Exchange:
    headers = sorted([name, value] for name, value in answer.getheaders() if name.lower() not in FRAMING)
    inflate = INFLATE.get(answer.headers.get("content-encoding", ""))
    body = (data if inflate is None else inflate(data)).decode("utf-8", errors="backslashreplace")
    return {"asked": asked, "status": answer.status, "reason": answer.reason, "headers": headers, "body": body}


def likeness(theirs: Sequence[Exchange], ours: Sequence[Exchange]) -> Likeness:
    """Of all that was asked for a case."""
    if plain(theirs) == plain(ours):
        return Likeness.IDENTICAL
    statuses = [[each["status"] for each in exchanges] for exchanges in (theirs, ours)]
    if statuses[0] == statuses[1]:
        return Likeness.SAME_STATUS
    is_worse = max(map(_badness, statuses[1]), default=0) > max(map(_badness, statuses[0]), default=0)
    return Likeness.WORSE if is_worse else Likeness.OTHER_STATUS


def plain(exchanges: Sequence[Exchange]) -> str:
    """Whatever the order in which they were done: some are at the same time."""
    return json.dumps(sorted(json.dumps(without_circumstances(each), sort_keys=True) for each in exchanges))


def without_circumstances(exchange: Exchange) -> Exchange:
    text = json.dumps(exchange)
    for pattern, replacement in VARYING:
        text = pattern.sub(replacement, text)
    plain_values: Exchange = json.loads(text)
    return plain_values


def _badness(status: int | str) -> int:
    """An answer, the client's fault, the server's."""
    if isinstance(status, int):
        return status // 100
    if status == "OK":
        return 2
    return 5 if status in ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "UNIMPLEMENTED") else 4


def summary(by_case: Mapping[str, Likeness]) -> str:
    """A line for each likeness, with the cases that are worse by name."""
    lines = []
    for kind in Likeness:
        cases = [name for name, found in by_case.items() if found is kind]
        named = f": {', '.join(cases)}" if kind in (Likeness.OTHER_STATUS, Likeness.WORSE) and cases else ""
        lines.append(f"{len(cases):4} {len(cases) / max(1, len(by_case)):4.0%} {kind.value}{named}")
    return "\n".join(lines)
