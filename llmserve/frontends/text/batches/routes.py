"""/v1/files and /v1/batches of OpenAI's API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import Request, Response
from pydantic import Field

from llmserve.errors import InvalidArgument, Unsupported
from llmserve.frontends.http.json_fields import Json
from llmserve.frontends.text.answers.event_stream import json_answer
from llmserve.frontends.text.answers.failures import Refused
from llmserve.frontends.text.batches.jobs import IN_PROGRESS, Jobs, errors_document
from llmserve.frontends.text.batches.lines import Endpoint, problems_of
from llmserve.frontends.text.batches.multipart import read_form
from llmserve.frontends.text.batches.store import BATCHES, FILES, OWNER, RUNNING, Document, Store, new_id
from llmserve.frontends.text.requests.fields import Labels
from llmserve.frontends.text.requests.validation import Strict
from llmserve.frontends.text.state import ApiState

Kept = TypeVar("Kept")
PURPOSE = "batch"
WINDOW_S = 24 * 60 * 60
MOST_LISTED = 100
DISABLED = "this server does not store files and batches; start it with --batch-dir DIR"


class BatchRequest(Strict):
    input_file_id: str = Field(description="An uploaded file with a request per line.")
    endpoint: Endpoint = Field(description="The API that the requests are for.")
    completion_window: Literal["24h"] = Field("24h", description="Only 24h is supported.")
    metadata: Labels | None = Field(None, description="Labels that the batch returns.")


@dataclass(frozen=True, slots=True)
class Files:
    state: ApiState
    opened: Store | None  # None: the server has no folder for files

    async def create(self, request: Request) -> Response:
        """Upload the requests of a batch, one per line."""
        form = read_form(request.headers.get("content-type", ""), await request.body())
        purpose = form["purpose"].content.decode("utf-8", "replace") if "purpose" in form else ""
        if purpose != PURPOSE:
            raise Refused(f"purpose must be '{PURPOSE}', got '{purpose[:50]}'", "purpose")
        if "file" not in form:
            raise Refused("the form has no file", "file")
        file, owner = form["file"], self.state.owner(request)
        name = file.filename[:255] or "requests.jsonl"
        return _shown(await asyncio.to_thread(self._store.add_file, owner, name, purpose, file.content))

    async def list(self, request: Request) -> Response:
        """List the files of the API key. The query parameter `purpose` filters them."""
        purpose = request.query_params.get("purpose", "")
        found = await asyncio.to_thread(self._store.owned, FILES, self.state.owner(request))
        return _listed([each for each in found if purpose in ("", each["purpose"])], request)

    async def retrieve(self, file_id: str, request: Request) -> Response:
        """Describe a file."""
        return _shown(await self._find(file_id, request))

    async def content(self, file_id: str, request: Request) -> Response:
        """Download a file."""
        found = await self._find(file_id, request)
        content = await asyncio.to_thread(self._store.content(found["id"]).read_bytes)
        return Response(content, media_type="application/octet-stream")

    async def delete(self, file_id: str, request: Request) -> Response:
        """Delete a file, unless a batch is reading it."""
        found = await self._find(file_id, request)
        batches = await asyncio.to_thread(self._store.unfinished)
        if using := [batch["id"] for batch in batches if batch["input_file_id"] == found["id"]]:
            raise InvalidArgument(f"{found['id']} is in use by {using[0]}; cancel that batch first")
        await asyncio.to_thread(self._store.delete_file, found["id"])
        return json_answer({"id": found["id"], "object": "file", "deleted": True})

    @property
    def _store(self) -> Store:
        return _open(self.opened)

    async def _find(self, file_id: str, request: Request) -> Document:
        return await asyncio.to_thread(self._store.find, FILES, self.state.owner(request), file_id)


@dataclass(frozen=True, slots=True)
class Batches:
    state: ApiState
    jobs: Jobs | None

    async def create(self, body: BatchRequest, request: Request) -> Response:
        """Start a batch: answer the requests of a file, with lower priority than live requests."""
        store, owner = _open(self.jobs).store, self.state.owner(request)
        file = await asyncio.to_thread(store.find, FILES, owner, body.input_file_id)
        count, problems = await asyncio.to_thread(problems_of, store.content(file["id"]), body.endpoint)
        batch = _new_batch(body, owner, count, problems)
        await asyncio.to_thread(store.write, BATCHES, batch)
        if not problems:
            _open(self.jobs).start(batch)
        return _shown(batch)

    async def list(self, request: Request) -> Response:
        """List the batches of the API key."""
        jobs = _open(self.jobs)
        found = await asyncio.to_thread(jobs.store.owned, BATCHES, self.state.owner(request))
        return _listed([jobs.current(batch) for batch in found], request)

    async def retrieve(self, batch_id: str, request: Request) -> Response:
        """Report the progress of a batch."""
        return _shown(_open(self.jobs).current(await self._find(batch_id, request)))

    async def cancel(self, batch_id: str, request: Request) -> Response:
        """Cancel a batch. Results so far are kept."""
        batch = await self._find(batch_id, request)
        if batch["status"] not in RUNNING:
            raise InvalidArgument(f"{batch['id']} is {batch['status']} and cannot be cancelled")
        return _shown(await _open(self.jobs).cancel(batch))

    async def _find(self, batch_id: str, request: Request) -> Document:
        return await asyncio.to_thread(_open(self.jobs).store.find, BATCHES, self.state.owner(request), batch_id)


def _open(found: Kept | None) -> Kept:
    if found is None:
        raise Unsupported(DISABLED)
    return found


def _new_batch(body: BatchRequest, owner: str, count: int, problems: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    now = int(time.time())
    moments = ("finalizing", "completed", "failed", "expired", "cancelling", "cancelled", "expires")
    status = "failed" if problems else IN_PROGRESS
    return {
        "id": new_id("batch_"),
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": errors_document(problems) if problems else None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": status,
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "in_progress_at": None,
        **{f"{moment}_at": None for moment in moments},
        f"{status}_at": now,
        "expires_at": now + WINDOW_S,
        "request_counts": {"total": 0 if problems else count, "completed": 0, "failed": 0},
        "metadata": body.metadata,
        OWNER: owner,
    }


def _without_owner(document: Document) -> dict[str, Json]:
    return {name: value for name, value in document.items() if name != OWNER}


def _shown(document: Document) -> Response:
    return json_answer(_without_owner(document))


def _listed(found: Sequence[Document], request: Request) -> Response:
    """A page of documents, by default the newest first. The query has `limit`, `order`, and `after`, an id."""
    limit, after = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
        raise Refused(f"limit must be a number from 1 to {MOST_LISTED}", "limit")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refused(f"order must be 'asc' or 'desc', got '{order[:50]}'", "order")
    found = found[::-1] if order == "asc" else found
    ids = [document["id"] for document in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = [_without_owner(document) for document in found[begin : begin + int(limit)]]
    return json_answer(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": begin + len(page) < len(found),
        }
    )
