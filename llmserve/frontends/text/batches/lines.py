"""The lines of a batch: its requests and results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

MAX_LINES = 50_000
MAX_LINE_BYTES = 4 << 20  # as for a single request
MOST_PROBLEMS = 20  # reported for a file
Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
METHOD = "POST"


@dataclass(frozen=True, slots=True)
class Asked:
    custom_id: str
    body: Mapping[str, Any]


def problems_of(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests, and their problems in OpenAI's format."""
    found: list[dict[str, Any]] = []
    ids: set[str] = set()
    count = 0
    for number, line in _numbered(path):
        count += 1
        problem = _problem(line, endpoint, ids)
        if count > MAX_LINES:
            problem = "too_many_tasks", f"the file has more than {MAX_LINES} requests", None
        if problem is not None:
            code, message, param = problem
            found.append({"code": code, "message": message, "param": param, "line": number})
        if count > MAX_LINES or len(found) >= MOST_PROBLEMS:
            break
    if not count:
        found.append({"code": "empty_file", "message": "the file has no requests", "param": None, "line": None})
    return count, found


def asked_lines(path: Path, *, after: int) -> Iterator[Asked]:
    """Yields the requests of a valid file, without the first `after`."""
    for place, (_, line) in enumerate(_numbered(path)):
        if place >= after:
            document = json.loads(line)
            yield Asked(document["custom_id"], document["body"])


def num_complete(path: Path) -> tuple[int, int]:
    """The number of results, and how many of them failed. Removes a last line that was cut off."""
    count = num_failed = size = 0
    if not path.exists():
        return 0, 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            size += len(line)
            count += 1
            num_failed += has_failed(json.loads(line))
    os.truncate(path, size)
    return count, num_failed


def has_failed(result: Mapping[str, Any]) -> bool:
    return result["error"] is not None or result["response"]["status_code"] != 200


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _problem(line: bytes, endpoint: str, ids: set[str]) -> tuple[str, str, str | None] | None:
    if len(line) > MAX_LINE_BYTES:
        return "line_too_long", f"the line has {len(line)} bytes; the maximum is {MAX_LINE_BYTES}", None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return "invalid_json_line", "the line is not JSON in UTF-8", None
    if not isinstance(document, dict):
        return "invalid_request", "the line must be a JSON object", None
    custom_id = document.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return "missing_required_parameter", "custom_id must be a string", "custom_id"
    if custom_id in ids:
        return "duplicate_custom_id", f"custom_id '{custom_id[:50]}' is used twice", "custom_id"
    ids.add(custom_id)
    if document.get("method") != METHOD:
        return "invalid_method", f"method must be {METHOD}", "method"
    if document.get("url") != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint, {endpoint}", "url"
    if not isinstance(document.get("body"), dict):
        return "missing_required_parameter", "body must be a JSON object", "body"
    for field in ("stream", "background"):
        if document["body"].get(field):
            return "invalid_request", f"{field} is not supported in batches", f"body.{field}"
    return None
