"""Runs batches. Their requests are sent to the application itself, as if a client had sent them one by one.

Live requests come first: a batch's tenant has a small part of its key's weight, so the scheduler starts its requests
when no others wait, and preempts them when others do. Results are written in the order of the requests; after a
restart, a batch continues after the last one. If a batch expires, requests without an answer get an error as result.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedWriter
from itertools import islice
from typing import Any

from llmserve.core import EVERYBODY, Tenant
from llmserve.frontends.http import asgi
from llmserve.frontends.http.error_answers import RETRY_AFTER_S
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.request_context import RequestContext, enter_request, made_id
from llmserve.frontends.text.batches.lines import METHOD, Asked, asked_lines, has_failed, num_complete
from llmserve.frontends.text.batches.store import BATCHES, OWNER, Document, Store, new_id
from llmserve.wire.http1.request import Request

AT_ONCE = 32  # concurrent requests of one batch
WINDOW = 4 * AT_ONCE  # requests that have begun, or whose results wait for earlier ones
NUM_READ = 8  # lines read at a time
NUM_RUNNING = 4  # concurrent batches of a key
PART = 0.001  # a batch's share of its key's weight
TOO_MANY, UNAVAILABLE = 429, 503  # statuses after which a request is retried
IN_PROGRESS, CANCELLING, FINALIZING = "in_progress", "cancelling", "finalizing"
EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the batch expired."}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    document: dict[str, Any]
    task: asyncio.Task[None] | None = None
    is_working: bool = False

    @property
    def id(self) -> str:
        return str(self.document["id"])

    def turns(self, status: str) -> None:
        self.document |= {"status": status, f"{status}_at": int(time.time())}

    def count(self, result: Mapping[str, Any]) -> None:
        self.document["request_counts"]["failed" if has_failed(result) else "completed"] += 1


@dataclass(slots=True)
class Jobs:
    """The batches of one server."""

    store: Store
    application: asgi.Application
    extensions: Extensions
    _jobs: dict[str, Job] = field(default_factory=dict)  # batches that have not ended
    _turns: defaultdict[str, asyncio.Semaphore] = field(
        default_factory=lambda: defaultdict(lambda: asyncio.Semaphore(NUM_RUNNING))
    )  # for each key, so that a key at its limits does not delay others

    def start(self, batch: Document) -> None:
        if batch["id"] in self._jobs:
            return
        job = Job({**batch, "request_counts": dict(batch["request_counts"])})
        self._jobs[job.id] = job
        job.task = asyncio.create_task(self._run(job))
        self.extensions.background.add(job.task)
        job.task.add_done_callback(self.extensions.background.discard)

    def resume(self) -> None:
        """Continue the batches that another process left."""
        for batch in self.store.unfinished():
            self.start(batch)

    def current(self, batch: Document) -> Document:
        """The current state of a batch."""
        job = self._jobs.get(batch["id"])
        return batch if job is None else job.document

    async def cancel(self, batch: Document) -> Document:
        """Cancel a batch. Results so far are kept. No effect on a batch that is ending."""
        self.start(batch)
        job = self._jobs[batch["id"]]
        if job.document["status"] == IN_PROGRESS:
            job.turns(CANCELLING)
            await asyncio.to_thread(self.store.write, BATCHES, job.document)
            if job.is_working and job.task is not None:
                job.task.cancel()
        return job.document

    async def _run(self, job: Job) -> None:
        try:
            if job.document["status"] == IN_PROGRESS:
                job.is_working = True
                await self._work_in_time(job)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if job.document["status"] != CANCELLING or current is None:
                raise  # the server stops: the next process continues
            current.uncancel()
            job.is_working = False
        except Exception as error:  # border: an internal error, or a full disk
            logger.exception("batch %s has failed", job.id)
            job.turns("failed")
            job.document["errors"] = _errors("server_error", str(error))
            await asyncio.to_thread(self.store.write, BATCHES, job.document)
            del self._jobs[job.id]
            return
        await self._finish(job)

    async def _work_in_time(self, job: Job) -> None:
        ends = job.document["expires_at"]
        limit = asyncio.timeout(None if ends is None else max(0.0, ends - time.time()))
        try:
            async with limit, self._turns[job.document[OWNER]]:
                await self._work(job)
        except TimeoutError:
            if not limit.expired():
                raise
            job.is_working = False
            job.document["expired_at"] = int(time.time())
            await asyncio.to_thread(self._give_up, job.document, await self._recount(job))

    def _give_up(self, document: Document, num_done: int) -> None:
        with self.store.results(document["id"]).open("ab") as file:
            for asked in asked_lines(self.store.content(document["input_file_id"]), after=num_done):
                result = {"id": new_id("batch_req_"), "custom_id": asked.custom_id, "response": None, "error": EXPIRED}
                file.write(json.dumps(result).encode("utf-8", "replace") + b"\n")

    async def _work(self, job: Job) -> None:
        document, results = job.document, self.store.results(job.id)
        tenant = self._tenant(document[OWNER])
        num_done = await self._recount(job)
        lines = asked_lines(self.store.content(document["input_file_id"]), after=num_done)
        busy = asyncio.Semaphore(min(AT_ONCE, tenant.max_answers or AT_ONCE))
        begun: deque[asyncio.Task[dict[str, Any]]] = deque()
        with results.open("ab") as file:
            try:
                while read := await asyncio.to_thread(lambda: [*islice(lines, NUM_READ)]):
                    begun += [asyncio.create_task(self._answer(asked, document, tenant, busy)) for asked in read]
                    while len(begun) >= WINDOW or (begun and begun[0].done()):
                        await self._keep(job, file, await begun[0])
                        begun.popleft()
                while begun:
                    await self._keep(job, file, await begun[0])
                    begun.popleft()
            finally:
                for task in begun:
                    task.cancel()
                await asyncio.gather(*begun, return_exceptions=True)

    async def _recount(self, job: Job) -> int:
        """The number of existing results. Updates the counts of the batch."""
        num_done, num_failed = await asyncio.to_thread(num_complete, self.store.results(job.id))
        job.document["request_counts"] |= {"completed": num_done - num_failed, "failed": num_failed}
        return num_done

    @staticmethod
    async def _keep(job: Job, file: BufferedWriter, result: Mapping[str, Any]) -> None:
        """Write a result. Not in a thread, so that a line is complete unless the process dies."""
        file.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        file.flush()
        job.count(result)

    async def _answer(self, asked: Asked, batch: Document, tenant: Tenant, busy: asyncio.Semaphore) -> dict[str, Any]:
        """The result of a request, which is retried while the server or the key has no capacity."""
        async with busy:
            while True:
                request_id = made_id()
                status, headers, content = await self._ask(batch["endpoint"], asked.body, tenant, request_id)
                if status not in (TOO_MANY, UNAVAILABLE):
                    break
                await asyncio.sleep(float(headers.get(b"retry-after", RETRY_AFTER_S)))
        response = {"status_code": status, "request_id": request_id, "body": json.loads(content)}
        return {"id": new_id("batch_req_"), "custom_id": asked.custom_id, "response": response, "error": None}

    async def _ask(
        self, endpoint: str, body: Mapping[str, Any], tenant: Tenant, request_id: str
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        request = Request(METHOD, endpoint, [], keeps_alive=False, is_http10=False)
        request.memory = self.extensions.requests
        request.share = request.memory.share()
        enter_request(RequestContext(f"{METHOD} {endpoint}", lambda name: None, None, request_id))
        call = _Call(json.dumps(body).encode())
        try:
            await self.application(asgi.scope_of(request, tenant), call.receive, call.send)
        finally:
            request.share.release()
        return call.status, call.headers, b"".join(call.pieces)

    def _tenant(self, owner: str) -> Tenant:
        keys = self.extensions.api_keys
        tenant = EVERYBODY if keys is None else keys.tenant_of(owner)
        return replace(tenant, weight=tenant.weight * PART)

    async def _finish(self, job: Job) -> None:
        """Write the output files and the final status. It can be repeated after an interruption at any point."""
        document = job.document
        how_it_ends = {f"{CANCELLING}_at": "cancelled", "expired_at": "expired"}
        end = next((end for moment, end in how_it_ends.items() if document.get(moment)), "completed")
        if document["status"] != FINALIZING:
            await self._recount(job)
            counts = document["request_counts"]
            document["output_file_id"] = new_id("file-") if counts["completed"] else None
            document["error_file_id"] = new_id("file-") if counts["failed"] else None
            job.turns(FINALIZING)
            await asyncio.to_thread(self.store.write, BATCHES, document)
        await asyncio.to_thread(self._write_outputs, document)
        job.turns(end)
        await asyncio.to_thread(self.store.write, BATCHES, document)
        self.store.results(job.id).unlink(missing_ok=True)
        del self._jobs[job.id]

    def _write_outputs(self, document: Document) -> None:
        results = self.store.results(document["id"])
        outputs = ((False, document["output_file_id"], "output"), (True, document["error_file_id"], "error"))
        for of_failed, file_id, name in outputs:
            if file_id is None:
                continue
            with results.open("rb") as source, self.store.content(file_id).open("wb") as target:
                target.writelines(line for line in source if has_failed(json.loads(line)) is of_failed)
            name = f"{document['id']}_{name}.jsonl"
            self.store.describe_file(file_id, document[OWNER], name, "batch_output")


class _Call:
    """One request to the application, and its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.pieces: list[bytes] = []

    async def receive(self) -> asgi.Message:
        if self._body is None:
            await asyncio.Event().wait()  # this client never disconnects
        body, self._body = self._body or b"", None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: asgi.Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.pieces.append(message.get("body", b""))


def _errors(code: str, message: str) -> dict[str, Any]:
    return errors_document([{"code": code, "message": message, "param": None, "line": None}])


def errors_document(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(found)}
