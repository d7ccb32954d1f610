"""/v1/files and /v1/batches with OpenAI's client: jobs in JSON lines, kept over a restart, behind live requests."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmserve.core import GenerateRequest, TokenEvent
from llmserve.errors import InvalidArgument, Unavailable
from llmserve.frontends.shared.api_keys import ApiKeys
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.batches import store as stores
from llmserve.frontends.text.batches.jobs import AT_ONCE, NUM_RUNNING
from llmserve.frontends.text.batches.lines import num_complete
from llmserve.frontends.text.batches.multipart import read_form
from llmserve.frontends.text.batches.store import Store
from llmserve.owned_directory import try_lock
from tests.frontends.server import RunningServer, wait_until
from tests.frontends.text.conftest import serving
from tests.frontends.text.talkers import WideEngine

CHAT: Any = "/v1/chat/completions"
KEYS = {"ann": "ann-0123456789abcdef", "ben": "ben-0123456789abcdef"}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}


@dataclass
class GatedEngine(WideEngine):
    """Answers `free` requests, and holds the others."""

    free: int = 10**9
    asked: list[GenerateRequest] = field(default_factory=list)
    held: list[asyncio.Event] = field(default_factory=list)

    def submit(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        return self._gated(super().submit(request))

    def give_up(self, server: RunningServer) -> None:
        """What is held is refused, as if the server had no room."""
        for event in self.held:
            server.loop.call_soon_threadsafe(event.set)

    async def _gated(self, events: AsyncGenerator[TokenEvent, None]) -> AsyncGenerator[TokenEvent, None]:
        if self.free <= 0:
            self.held.append(asyncio.Event())
            await self.held[-1].wait()
            raise Unavailable("there is no room")
        self.free -= 1
        async for event in events:
            yield event


def lines_of(bodies: Sequence[dict[str, Any]], url: str = CHAT) -> bytes:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@contextmanager
def open_client(server: RunningServer, key: str = "none") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=key, max_retries=0) as client:
        yield client


@contextmanager
def batching(
    text_dir: Path, folder: Path, engine: WideEngine | None = None, keys: ApiKeys | None = None
) -> Iterator[RunningServer]:
    made = engine or GatedEngine([[300]])
    with serving(text_dir, keys, open_engine=lambda: made, text=TextSettings(batch_dir=folder)) as server:
        yield server


def create(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch_id)


def num_answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def results(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.fixture(scope="module")
def server(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with batching(text_dir, tmp_path_factory.mktemp("batches")) as running:
        yield running


@pytest.fixture(scope="module")
def batch_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with open_client(server) as client:
        yield client


def test_results_come_in_order_with_errors_of_their_own(batch_client: openai.OpenAI) -> None:
    bodies = [{**BODY, "temperature": 5} if number % 10 == 3 else BODY for number in range(3 * AT_ONCE)]
    batch = ended(batch_client, create(batch_client, lines_of(bodies)).id)
    wrong = [number for number in range(len(bodies)) if number % 10 == 3]
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (len(bodies), len(bodies) - len(wrong), len(wrong))
    good, bad = results(batch_client, batch.output_file_id), results(batch_client, batch.error_file_id)
    assert [line["custom_id"] for line in good] == [f"r{i}" for i in range(len(bodies)) if i not in wrong]
    assert [line["custom_id"] for line in bad] == [f"r{i}" for i in wrong]
    alone = batch_client.chat.completions.create(model="ensemble", **BODY)
    for line in good:
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert {line["response"]["status_code"] for line in bad} == {400}
    assert "temperature" in bad[0]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [("/v1/completions", {"prompt": "Hello"}), ("/v1/responses", {"input": "Hello", "max_output_tokens": 16})],
)
def test_other_endpoints(batch_client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    batch = ended(batch_client, create(batch_client, lines_of([body], endpoint), endpoint).id)
    (line,) = results(batch_client, batch.output_file_id)
    assert line["response"]["body"]["model"] == "ensemble"
    assert batch.error_file_id is None


def test_files_and_batches_are_listed_and_deleted(batch_client: openai.OpenAI) -> None:
    content = lines_of([BODY])
    made = [create(batch_client, content) for _ in range(3)]
    for batch in made:
        ended(batch_client, batch.id)
    ids = [batch.id for batch in batch_client.batches.list(limit=2)]  # which asks for the next pages
    assert set(ids) >= {batch.id for batch in made}
    assert len(ids) == len(set(ids))
    assert len(batch_client.batches.list(limit=2).data) == 2
    file = batch_client.files.retrieve(made[0].input_file_id)
    assert (file.bytes, file.filename, file.purpose) == (len(content), "requests.jsonl", "batch")
    assert batch_client.files.content(file.id).content == content
    assert file.id in [each.id for each in batch_client.files.list()]
    assert {each.purpose for each in batch_client.files.list(purpose="batch_output")} == {"batch_output"}
    assert [*batch_client.files.list(purpose="assistants")] == []
    newest = [each.id for each in batch_client.files.list(limit=2)]
    assert [each.id for each in batch_client.files.list(limit=2, order="asc")] == newest[::-1]
    assert batch_client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        batch_client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_request"),
        (lines_of([BODY]) * 2, "duplicate_custom_id"),
        (lines_of([BODY], "/v1/completions"), "mismatched_url"),
        (lines_of([{**BODY, "stream": True}]), "invalid_request"),
        (lines_of([BODY]).replace(b"POST", b"GET"), "invalid_method"),
        (lines_of([BODY]).replace(b'"r0"', b"7"), "missing_required_parameter"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}', "missing_required_parameter"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
    ],
)
def test_a_file_that_is_wrong_fails_as_a_whole(batch_client: openai.OpenAI, content: bytes, code: str) -> None:
    batch = create(batch_client, content)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == code


def test_wrong_uploads_are_refused(server: RunningServer, batch_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        batch_client.files.create(file=b"x", purpose="assistants")
    with httpx.Client(base_url=server.http_url) as http:
        assert http.post("/v1/files", json={}).status_code == 400
        assert http.post("/v1/files", data={"purpose": "batch"}).status_code == 400
        assert http.post("/v1/files", files={"x": b"1"}, data={"purpose": "batch"}).status_code == 400
        assert http.get("/v1/files/..%2Fx").status_code == 404
        assert http.get("/v1/files", params={"limit": "0"}).status_code == 400
        assert http.get("/v1/files", params={"order": "up"}).json()["error"]["param"] == "order"
        unknown = {"input_file_id": "file-0", "endpoint": CHAT}
        assert http.post("/v1/batches", json=unknown).status_code == 404
        assert http.post("/v1/batches", json={**unknown, "endpoint": "/v1/rerank"}).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n\r\n",
        b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n1",
        b"--b\r\nx\r\n--b--\r\n",
        b"--b\r\n\r\n1\r\n" * 40 + b"--b--",
    ],
)
def test_a_form_that_is_cut_off_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        read_form("multipart/form-data; boundary=b", body)


def test_a_form_may_hold_anything() -> None:
    content = b"\r\n--c\r\n\r\n--\x00\xff"
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa9.jsonl"\r\n\r\n'
    form = read_form("multipart/form-data; boundary=b", head + content + b"\r\n--b--\r\n")
    assert (form["file"].content, form["file"].filename) == (content, "é.jsonl")


def test_a_server_without_a_folder_says_so(http: httpx.Client) -> None:
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches"), ("GET", "/v1/batches/batch_0")):
        answer = http.request(method, path)
        assert answer.status_code == 400
        assert "--batch-dir" in answer.json()["error"]["message"]


def test_a_batch_is_cancelled_and_keeps_what_it_has(text_dir: Path, tmp_path: Path) -> None:
    engine = GatedEngine([[300]], free=5)
    with batching(text_dir, tmp_path, engine) as server, open_client(server) as client:
        batch = create(client, lines_of([BODY] * 50))
        wait_until(lambda: num_answered(client, batch.id) == 5)
        with pytest.raises(openai.BadRequestError, match="cancel that batch first"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 5)
        assert [line["custom_id"] for line in results(client, batch.output_file_id)] == [f"r{i}" for i in range(5)]
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.batches.cancel(batch.id)


def test_a_batch_goes_on_where_another_process_ended(text_dir: Path, tmp_path: Path) -> None:
    engine = GatedEngine([[300]], free=7)
    with batching(text_dir, tmp_path, engine) as server, open_client(server) as client:
        batch = create(client, lines_of([BODY] * 40))
        wait_until(lambda: num_answered(client, batch.id) == 7 and len(engine.held) >= AT_ONCE)
        engine.give_up(server)
    (journal,) = (tmp_path / "batches").glob("*.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"id": "batch_req_cut')  # as a process leaves it that dies
    engine = GatedEngine([[300]])
    with batching(text_dir, tmp_path, engine) as server, open_client(server) as client:
        done = ended(client, batch.id)
        assert [line["custom_id"] for line in results(client, done.output_file_id)] == [f"r{i}" for i in range(40)]
        assert len(engine.asked) == 33
        wait_until(lambda: not journal.exists())


def test_a_batch_whose_outputs_were_being_written_is_finished(text_dir: Path, tmp_path: Path) -> None:
    with batching(text_dir, tmp_path) as server, open_client(server) as client:
        batch = ended(client, create(client, lines_of([BODY] * 3)).id)
        lines = client.files.content(batch.output_file_id).content
    state = tmp_path / "batches" / f"{batch.id}.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps({**document, "status": "finalizing"}))
    (tmp_path / "batches" / f"{batch.id}.jsonl").write_bytes(lines)
    (tmp_path / "files" / f"{batch.output_file_id}.json").unlink()
    with batching(text_dir, tmp_path) as server, open_client(server) as client:
        again = ended(client, batch.id)
        assert again.output_file_id == batch.output_file_id
        assert client.files.content(again.output_file_id).content == lines


def test_a_batch_that_expires_says_so_of_each_request_left(text_dir: Path, tmp_path: Path) -> None:
    engine = GatedEngine([[300]], free=5)
    with batching(text_dir, tmp_path, engine) as server, open_client(server) as client:
        made = create(client, lines_of([BODY] * 40))
        assert made.expires_at == made.created_at + 24 * 60 * 60
        wait_until(lambda: num_answered(client, made.id) == 5 and len(engine.held) >= AT_ONCE)
        engine.give_up(server)
    path = tmp_path / "batches" / f"{made.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "expires_at": made.created_at}))
    with batching(text_dir, tmp_path, GatedEngine([[300]], free=0)) as server, open_client(server) as client:
        batch = ended(client, made.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 5, 35)
        assert batch.expired_at is not None
        done, left = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert [line["custom_id"] for line in done + left] == [f"r{number}" for number in range(40)]
        assert {(line["response"], line["error"]["code"]) for line in left} == {(None, "batch_expired")}


def test_the_head_of_a_file_comes_without_its_content(server: RunningServer, batch_client: openai.OpenAI) -> None:
    file = batch_client.files.create(file=("requests.jsonl", lines_of([BODY])), purpose="batch")
    with httpx.Client(base_url=server.http_url) as client:
        path = f"/v1/files/{file.id}/content"
        assert (client.head(path).content, client.get(path).content) == (b"", lines_of([BODY]))


def test_a_key_without_answers_left_keeps_no_others_batches_waiting(text_dir: Path, tmp_path: Path) -> None:
    from llmserve.engine.fake import fake_engine
    from tests.frontends.text.conftest import LIMITS

    file, text = tmp_path / "keys.yaml", TextSettings(batch_dir=tmp_path / "data")
    limits = {"ann": "max_answers: 2, tokens_per_minute: 1", "ben": "max_answers: 2"}
    file.write_text(f"keys: [{', '.join(f'{{name: {name}, key: {KEYS[name]}, {limits[name]}}}' for name in KEYS)}]")
    with (
        serving(text_dir, ApiKeys(file), open_engine=lambda: fake_engine(LIMITS), text=text) as server,
        open_client(server, KEYS["ann"]) as ann,
        open_client(server, KEYS["ben"]) as ben,
    ):
        waiting = [create(ann, lines_of([BODY] * 4)) for _ in range(NUM_RUNNING)]
        wait_until(lambda: sum(num_answered(ann, batch.id) for batch in waiting) > 0)
        too_many, done = (ended(ben, create(ben, lines_of([body])).id) for body in ({**BODY, "n": 3}, BODY))
        assert (too_many.request_counts.failed, done.request_counts.completed) == (1, 1)
        (line,) = results(ben, too_many.error_file_id)
        assert line["response"]["status_code"] == 400
        assert all(ann.batches.retrieve(batch.id).status == "in_progress" for batch in waiting)


def test_keys_see_their_own(text_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [" + ", ".join(f"{{name: {name}, key: {key}}}" for name, key in KEYS.items()) + "]")
    engine = GatedEngine([[300]])
    with (
        batching(text_dir, tmp_path / "data", engine, ApiKeys(file)) as server,
        open_client(server, KEYS["ann"]) as ann,
        open_client(server, KEYS["ben"]) as ben,
    ):
        batch = ended(ann, create(ann, lines_of([BODY])).id)
        for call in (
            lambda: ben.batches.retrieve(batch.id),
            lambda: ben.batches.cancel(batch.id),
            lambda: ben.files.content(batch.output_file_id),
            lambda: ben.files.delete(batch.input_file_id),
            lambda: ben.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert (len(ben.files.list().data), len(ben.batches.list().data)) == (0, 0)
        (asked,) = engine.asked
        assert (asked.tenant.name, asked.tenant.weight) == ("ann", 0.001)


def test_a_withdrawn_key_ends_its_batches(text_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    both = [f"{{name: {name}, key: {key}}}" for name, key in KEYS.items()]
    file.write_text(f"keys: [{', '.join(both)}]")
    engine = GatedEngine([[300]], free=0)
    with (
        batching(text_dir, tmp_path / "data", engine, ApiKeys(file)) as server,
        open_client(server, KEYS["ann"]) as ann,
    ):
        batch = create(ann, lines_of([BODY]))
        wait_until(lambda: bool(engine.held))
        engine.give_up(server)
    file.write_text(f"keys: [{both[1]}]")
    with batching(text_dir, tmp_path / "data", None, ApiKeys(file)):
        state = tmp_path / "data" / "batches" / f"{batch.id}.json"
        wait_until(lambda: json.loads(state.read_text())["status"] == "failed")
        assert "withdrawn" in state.read_text()


def test_live_requests_are_not_behind_a_batch(text_dir: Path, tmp_path: Path) -> None:
    """The fake engine has the real scheduler."""
    from llmserve.engine.fake import fake_engine
    from tests.frontends.text.conftest import LIMITS

    with (
        serving(text_dir, open_engine=lambda: fake_engine(LIMITS), text=TextSettings(batch_dir=tmp_path)) as server,
        open_client(server) as client,
    ):
        long: dict[str, Any] = {**BODY, "max_tokens": 200, "ignore_eos": True}
        batch = create(client, lines_of([long] * 200))
        for _ in range(20):
            began = num_answered(client, batch.id)
            client.chat.completions.create(model="ensemble", **BODY)
            assert num_answered(client, batch.id) - began < AT_ONCE * 4
        assert num_answered(client, ended(client, batch.id).id) == 200


def test_one_server_at_a_time_has_a_folder(tmp_path: Path) -> None:
    first = Store.open(tmp_path)
    with pytest.raises(InvalidArgument, match="used by another server"):
        Store.open(tmp_path)
    assert first.folder == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot hold batches"):
        Store.open(tmp_path / "file")


def test_the_folder_may_be_a_volume_that_belongs_to_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes lets a pod write there as a group."""
    monkeypatch.setattr(stores, "try_lock", lambda folder: None if folder == tmp_path else try_lock(folder))
    Store.open(tmp_path).close()


def test_a_full_disk_keeps_nothing_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)

    def full(*paths: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Unavailable, match="cannot be written: No space left on device"):
        store.add_file("a", "x", "batch", b"123456")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_key_may_have_so_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    monkeypatch.setattr(stores, "MAX_OWNED_BYTES", 10)
    store.add_file("a", "x", "batch", b"123456")
    store.add_file("b", "x", "batch", b"123456")
    with pytest.raises(InvalidArgument, match="delete some"):
        store.add_file("a", "x", "batch", b"123456")
    monkeypatch.setattr(stores, "MAX_FILES", 1)
    with pytest.raises(InvalidArgument, match="delete some"):
        store.add_file("a", "x", "batch", b"")


def test_a_line_that_is_cut_off_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert num_complete(path) == (0, 0)
    line = json.dumps({"error": None, "response": {"status_code": 400}}) + "\n"
    path.write_text(line + line[:-1])
    assert num_complete(path) == (1, 1)
    assert path.read_text() == line
