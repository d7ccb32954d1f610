"""API keys on both protocols: who has none, a wrong one, or one without the right is refused."""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import queue
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from llmserve.core import EVERYBODY, Tenant
from llmserve.errors import InvalidArgument
from llmserve.frontends.shared import api_keys
from llmserve.frontends.shared.api_keys import FOR_ADMINS, WITHOUT_KEY, ApiKeys, Lack, owner_of_key, read_owners
from llmserve.frontends.shared.restrictions import API_OF_PATH, API_OF_RPC, Api
from tests.frontends.server import HOST, RunningServer, running_server
from tests.frontends.shared.test_restrictions import ROUTES, RPCS, ask, filled
from tests.frontends.stub_core import StubCore

KEY, ADMIN_KEY, WRONG = "user-0123456789abcdef", "admin-0123456789abcdef", "nobody-0123456789abcdef"
ENTRIES = f"""\
keys:
  - name: user
    key: {KEY}
  - name: admin
    sha256: {hashlib.sha256(ADMIN_KEY.encode()).hexdigest()}
    admin: true
    weight: 2.5
    max_answers: 3
    tokens_per_minute: 1000
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(ENTRIES)
    return path


@pytest.fixture(scope="module")
def locked(file: Path) -> Iterator[RunningServer]:
    with running_server(StubCore, api_keys=ApiKeys(file)) as running:
        yield running


def returned(core: StubCore) -> StubCore:
    return core


def expected(api: Api, key: str) -> Lack | None:
    if api in WITHOUT_KEY or key == ADMIN_KEY:
        return None
    if key == KEY:
        return Lack.NO_ADMIN if api in FOR_ADMINS else None
    return Lack.WRONG_KEY if key else Lack.NO_KEY


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", ["", WRONG, KEY, ADMIN_KEY])
def test_every_route_wants_a_key(locked: RunningServer, method: str, path: str, key: str) -> None:
    status, body = ask(locked, method, filled(path), {"Authorization": f"Bearer {key}"} if key else {})
    lack = expected(API_OF_PATH[path], key)
    if lack is None:
        assert status not in (401, 403)
    else:
        assert (status, json.loads(body)) == (403 if lack is Lack.NO_ADMIN else 401, {"error": lack.value})


@pytest.mark.parametrize("name", [rpc.name for rpc in RPCS])
@pytest.mark.parametrize("key", ["", WRONG, KEY, ADMIN_KEY])
def test_every_rpc_wants_a_key(locked: RunningServer, name: str, key: str) -> None:
    rpc = next(rpc for rpc in RPCS if rpc.name == name)
    request = GetMessageClass(rpc.input_type)()
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    code, details = "OK", ""
    with grpc.insecure_channel(locked.grpc) as channel:
        method = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), name)
        try:
            if rpc.client_streaming:
                list(method(iter([request]), metadata=metadata, timeout=20))
            else:
                method(request, metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            code, details = error.code().name, error.details()
    lack = expected(API_OF_RPC[name], key)
    if lack is None:
        assert code not in ("UNAUTHENTICATED", "PERMISSION_DENIED")
    else:
        wanted = "PERMISSION_DENIED" if lack is Lack.NO_ADMIN else "UNAUTHENTICATED"
        assert (code, details) == (wanted, lack.value)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY}"},
        {"Authorization": KEY},
        {"x-api-key": KEY},
    ],
)
def test_how_a_key_is_sent(locked: RunningServer, headers: dict[str, str]) -> None:
    assert ask(locked, "GET", "/v2/models/echo", headers)[0] == 200


@pytest.mark.parametrize(
    "value", ["Bearer", "Bearer ", "", KEY[:-1], KEY + "x", f"Basic {KEY}", "\xff\xfe" * 10, f"Bearer {KEY} {KEY}"]
)
def test_what_is_no_key(locked: RunningServer, value: str) -> None:
    assert ask(locked, "GET", "/v2/models/echo", {"Authorization": value})[0] == 401


def test_a_refusal_says_how_to_authenticate(locked: RunningServer) -> None:
    connection = http.client.HTTPConnection(HOST, locked.http_port, timeout=20)
    connection.request("GET", "/v2")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("WWW-Authenticate")) == (401, "Bearer")
    connection.close()


def test_tritonclients_with_a_key(locked: RunningServer) -> None:
    x = np.ones((1, 2), np.float32)
    headers = {"authorization": f"Bearer {KEY}"}  # to which tritonclient adds
    for module, url in ((triton_http, locked.http), (triton_grpc, locked.grpc)):
        inputs = [module.InferInput(name, [1, 2], "FP32") for name in ("INPUT0", "INPUT1")]
        for each in inputs:
            each.set_data_from_numpy(x)
        with module.InferenceServerClient(url) as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="requires an API key"):
                client.infer("add_two", inputs)
            assert client.infer("add_two", inputs, headers=dict(headers)).as_numpy("OUTPUT0").tolist() == [[2, 2]]
            with pytest.raises(InferenceServerException, match="admin rights"):
                client.load_model("add_two", headers=dict(headers))


def test_models_see_whom_a_request_is_for(file: Path) -> None:
    """Over both protocols, unary and streaming; and nobody without keys."""
    x = np.ones((1, 2), np.float32)
    metadata = {"authorization": ADMIN_KEY}
    for keys, expected in ((ApiKeys(file), Tenant("admin", 2.5, 3, 1000)), (None, EVERYBODY)):
        core = StubCore()
        with running_server(partial(returned, core), api_keys=keys) as server:
            for module, url in ((triton_http, server.http), (triton_grpc, server.grpc)):
                inputs = [module.InferInput(name, [1, 2], "FP32") for name in ("INPUT0", "INPUT1")]
                for each in inputs:
                    each.set_data_from_numpy(x)
                with module.InferenceServerClient(url) as client:
                    client.infer("add_two", inputs, headers=dict(metadata))
            with grpc.insecure_channel(server.grpc) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                request = service_pb2.ModelInferRequest(model_name="count")
                request.inputs.add(name="N", datatype="INT32", shape=[1, 1]).contents.int_contents.append(1)
                list(stub.ModelStreamInfer(iter([request]), metadata=tuple(metadata.items()), timeout=20))
            asked = http.client.HTTPConnection(HOST, server.http_port, timeout=20)
            asked.request("POST", "/v2/models/count/generate_stream", json.dumps({"N": 1}), metadata)
            assert asked.getresponse().read().startswith(b"data: ")
            asked.close()
        assert [request.tenant for request in core.requests] == [expected] * 4


def test_a_file_that_changes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text(ENTRIES)
    keys = ApiKeys(path, [owner_of_key("fixed", "0123456789abcdef-fixed", is_admin=False, source="here")])

    def known() -> list[str]:
        tried = (KEY, ADMIN_KEY, WRONG, "0123456789abcdef-fixed")
        return [owner.name for key in tried if (owner := keys.owner(key.encode()))]

    assert known() == ["user", "admin", "fixed"]
    path.write_text(f"keys: [{{name: other, key: {WRONG}}}]")
    assert known() == ["other", "fixed"]
    with caplog.at_level(logging.ERROR):
        path.write_text("keys: [nobody")
        assert [known() for _ in range(3)] == [["other", "fixed"]] * 3
        os.unlink(path)
        assert known() == ["other", "fixed"]
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 2
    path.write_text(ENTRIES)
    assert known() == ["user", "admin", "fixed"]


def test_a_file_without_keys_does_not_lock_everybody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text(ENTRIES)
    keys = ApiKeys(path)
    path.write_text("keys: []")
    assert keys.owner(KEY.encode()) is not None


def test_everything_that_is_wrong_with_a_file_is_said_and_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"""\
keys:
  - {KEY}
  - {{name: "a b", key: short}}
  - {{name: c, key: {KEY}, sha256: {"0" * 64}}}
  - {{name: d}}
  - {{name: e, sha256: XYZ, admin: 1, color: red}}
  - {{name: f, key: {KEY}}}
  - {{name: f, key: {WRONG}}}
  - {{name: g, key: {KEY}}}
  - {{name: h, key: "{WRONG}-2", weight: 0, max_answers: -1, tokens_per_minute: 1.5, adapters: a}}
"""
    )
    with pytest.raises(InvalidArgument) as caught:
        read_owners(path)
    text = str(caught.value)
    for words in (
        "(14 problems)",
        "entry 1 is not a mapping",
        "entry 2 (a b): name must be",
        "entry 2 (a b): a key must be at least 16",
        "entry 3 (c): give either key or sha256",
        "entry 4 (d): give either",
        "entry 5 (e): unknown field 'color'",
        "entry 5 (e): sha256 must be",
        "entry 5 (e): admin must be",
        "entry 9 (h): weight must be a number from 0.01 to 100",
        "entry 9 (h): max_answers must be an integer",
        "entry 9 (h): adapters must be a list of the adapters' names",
        "entry 9 (h): tokens_per_minute must be an integer",
        "duplicate name: f",
        "duplicate key: f, g",
    ):
        assert words in text
    assert KEY not in text
    assert "short" not in text


@pytest.mark.parametrize(
    "content",
    ["", "keys:", "keys: 3", "[]", "keys: []\nmore: 1", "keys: [", "\xff", "keys: [{name: 2026-02-30}]", "[" * 5000],
)
def test_files_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"keys\.yaml"):
        read_owners(path)


def test_a_server_that_nobody_could_call_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("keys: []")
    with pytest.raises(InvalidArgument, match="no client could call"):
        ApiKeys(tmp_path / "keys.yaml")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        ApiKeys(tmp_path / "none.yaml")
    with pytest.raises(InvalidArgument, match="LLMSERVE_API_KEY: a key must be"):
        owner_of_key("environment", "short", is_admin=False, source="LLMSERVE_API_KEY")


def test_owners_do_not_show_their_keys(file: Path) -> None:
    owners = read_owners(file)
    assert KEY not in repr(owners)
    assert hashlib.sha256(KEY.encode()).hexdigest()[:8] not in repr(owners)


def test_a_request_under_way_stays_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would have no limits otherwise."""
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "keys.yaml"
    file.write_text(ENTRIES)
    keys, header = ApiKeys(file), {"authorization": f"Bearer {KEY}"}.get
    before = keys.tenant(header)
    file.write_text(f"keys:\n  - name: another-one\n    key: {WRONG}\n")
    assert keys.lack(Api.INFERENCE, header) is Lack.WRONG_KEY
    assert keys.tenant(header) == before != EVERYBODY
    assert keys.owner_of({"authorization": f"Bearer {ADMIN_KEY[::-1]}"}.get) is None


def test_an_open_stream_takes_no_request_of_a_key_that_was_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that have begun go on."""
    monkeypatch.setattr(api_keys, "CHECK_INTERVAL_S", 0.0)
    file = tmp_path / "keys.yaml"
    file.write_text(ENTRIES)
    requests: queue.Queue[service_pb2.ModelInferRequest | None] = queue.Queue()

    def send(request_id: str, count: int) -> None:
        request = service_pb2.ModelInferRequest(model_name="count", id=request_id)
        request.inputs.add(name="N", datatype="INT32", shape=[1, 1]).contents.int_contents.append(count)
        requests.put(request)

    with running_server(StubCore, api_keys=ApiKeys(file)) as server, grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = (("authorization", f"Bearer {KEY}"),)
        answers = stub.ModelStreamInfer(iter(requests.get, None), metadata=metadata, timeout=60)
        send("endless", -1)
        assert next(answers).infer_response.id == "endless"
        file.write_text(f"keys: [{{name: other, key: {WRONG}}}]")
        send("late", 1)
        refused = next(answer for answer in answers if answer.infer_response.id == "late")
        assert refused.error_message == Lack.WRONG_KEY.value
        assert next(answers).infer_response.id == "endless"
        requests.put(None)
        answers.cancel()
