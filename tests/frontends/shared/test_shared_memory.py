"""System shared memory over both protocols, as tritonclient uses it, and regions that do not hold what they say."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from llmserve.errors import AlreadyExists, InternalError, InvalidArgument, NotFound, ResourceExhausted
from llmserve.frontends.shared.shared_memory import (
    MAX_REGIONS,
    SHARE_OF_FILES,
    Place,
    SharedMemory,
    max_regions,
)
from tests.frontends.server import RunningServer, running_server
from tests.frontends.stub_core import StubCore

SIZE = 4096
X = np.array([[1, 2]], dtype=np.float32)
Y = np.array([[10, 20]], dtype=np.float32)


@pytest.fixture
def key() -> Iterator[str]:
    """A shared-memory object of `SIZE` bytes."""
    name = f"llmserve-test-{os.getpid()}"
    handle = shm.create_shared_memory_region("region", name, SIZE, create_only=True)
    shm.set_shared_memory_region(handle, [X, Y])
    yield f"/{name}"
    shm.destroy_shared_memory_region(handle)


@pytest.fixture(params=[triton_grpc, triton_http], ids=["grpc", "http"])
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(wire: Any, server: RunningServer, core: StubCore) -> Iterator[Any]:
    with wire.InferenceServerClient(server.grpc if wire is triton_grpc else server.http) as made:
        yield made
        made.unregister_system_shared_memory()


def content(key: str, offset: int, count: int) -> list[float]:
    with open(f"/dev/shm{key}", "rb") as file:
        values: list[float] = np.frombuffer(file.read(), np.float32, count, offset).tolist()
    return values


def times_open(key: str) -> int:
    """How many descriptors of this process are of an object. Other tests' threads may open and close others."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return links.count(f"/dev/shm{key}")


def shared(wire: Any, name: str, *place: Any) -> Any:
    tensor = wire.InferInput(name, [1, 2], "FP32")
    tensor.set_shared_memory(*place)
    return tensor


def shared_output(wire: Any, *place: Any) -> Any:
    output = wire.InferRequestedOutput("OUTPUT0")
    output.set_shared_memory(*place)
    return output


def test_tensors_come_from_and_go_to_shared_memory(client: Any, wire: Any, key: str) -> None:
    client.register_system_shared_memory("in", key, 16)
    client.register_system_shared_memory("out", key, SIZE - 64, offset=64)
    inputs = [shared(wire, "INPUT0", "in", 8), shared(wire, "INPUT1", "in", 8, 8)]
    result = client.infer("add_two", inputs, outputs=[shared_output(wire, "out", 16, 32)])
    assert content(key, 64 + 32, 2) == [11, 22]
    output = result.get_output("OUTPUT0")
    assert (output if isinstance(output, dict) else {"shape": list(output.shape)})["shape"] == [1, 2]
    plain = wire.InferInput("INPUT1", [1, 2], "FP32")
    plain.set_data_from_numpy(Y * 100)
    mixed = client.infer("add_two", [shared(wire, "INPUT0", "in", 8), plain])
    assert mixed.as_numpy("OUTPUT0").tolist() == [[1001, 2002]]


def test_strings_in_shared_memory(client: Any, wire: Any, key: str) -> None:
    data = serialize_byte_tensor(np.array([b"one", b"", "zwölf".encode()], dtype=object)).item()
    with open(f"/dev/shm{key}", "r+b") as file:
        file.write(data)
    client.register_system_shared_memory("in", key, SIZE)
    tensor = wire.InferInput("TEXT", [3], "BYTES")
    tensor.set_shared_memory("in", len(data))
    output = wire.InferRequestedOutput("TEXT")
    output.set_shared_memory("in", 100, 1000)
    client.infer("echo", [tensor], outputs=[output])
    with open(f"/dev/shm{key}", "rb") as file:
        assert file.read()[1000 : 1000 + len(data)] == data


def test_regions_are_listed_and_forgotten(client: Any, wire: Any, key: str) -> None:
    client.register_system_shared_memory("a", key, 16, offset=8)
    client.register_system_shared_memory("b", key, 4)  # several of one object
    listed = client.get_system_shared_memory_status()
    if wire is triton_http:
        assert listed == [
            {"name": "a", "key": key, "offset": 8, "byte_size": 16},
            {"name": "b", "key": key, "offset": 0, "byte_size": 4},
        ]
    else:
        assert {name: (row.key, row.offset, row.byte_size) for name, row in listed.regions.items()} == {
            "a": (key, 8, 16), "b": (key, 0, 4),
        }  # fmt: skip
    with pytest.raises(InferenceServerException, match="shared memory region 'a' already in manager"):
        client.register_system_shared_memory("a", key, 16)
    client.unregister_system_shared_memory("a")
    client.unregister_system_shared_memory("never registered")
    with pytest.raises(InferenceServerException, match="Unable to find system shared memory region: 'a'"):
        client.get_system_shared_memory_status("a")
    client.unregister_system_shared_memory()
    assert not getattr(client.get_system_shared_memory_status(), "regions", [])


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (("nope", 8), "Unable to find shared memory region: 'nope'"),
        (("in", 8, SIZE - 4), "Invalid offset + byte size for shared memory region: 'in'"),
        (("in", 8, SIZE), "Invalid offset for shared memory region: 'in'"),
        (("in", 2**62), "Invalid offset + byte size for shared memory region: 'in'"),
        (("in", 8, 2**62), "Invalid offset for shared memory region: 'in'"),
        (("in", 0), "Invalid offset + byte size for shared memory region: 'in'"),
    ],
)
def test_places_outside_of_a_region(
    client: Any, wire: Any, key: str, core: StubCore, place: tuple[Any, ...], words: str
) -> None:
    client.register_system_shared_memory("in", key, SIZE)
    good = [shared(wire, "INPUT0", "in", 8), shared(wire, "INPUT1", "in", 8)]
    with pytest.raises(InferenceServerException) as caught:
        client.infer("add_two", [shared(wire, "INPUT0", *place), good[1]])
    assert words in str(caught.value)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("add_two", good, outputs=[shared_output(wire, *place)])
    assert words in str(caught.value)
    assert core.requests == []  # an answer that nobody can take is not computed
    assert client.infer("add_two", good).as_numpy("OUTPUT0").tolist() == [[2, 4]]


def test_sizes_that_do_not_fit(client: Any, wire: Any, key: str) -> None:
    client.register_system_shared_memory("in", key, SIZE)
    good = [shared(wire, "INPUT0", "in", 8), shared(wire, "INPUT1", "in", 8)]
    with pytest.raises(InferenceServerException, match=r"input byte size mismatch .* Expected 8, got 16"):
        client.infer("add_two", [shared(wire, "INPUT0", "in", 16), good[1]])
    with pytest.raises(InferenceServerException, match=r"output 'OUTPUT0' \(4 bytes\) should be at least 8 bytes"):
        client.infer("add_two", good, outputs=[shared_output(wire, "in", 4)])
    with open(f"/dev/shm{key}", "r+b") as file:
        file.truncate(4)
    with pytest.raises(InferenceServerException, match="region 'in' has become smaller"):
        client.infer("add_two", good)
    plain = [wire.InferInput(name, [1, 2], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in plain:
        tensor.set_data_from_numpy(X)
    with pytest.raises(InferenceServerException, match="region 'in' has become smaller"):
        client.infer("add_two", plain, outputs=[shared_output(wire, "in", 8)])
    assert os.stat(f"/dev/shm{key}").st_size == 4
    assert client.infer("add_two", plain).as_numpy("OUTPUT0").tolist() == [[2, 4]]


def test_a_stream_answers_into_shared_memory(server: RunningServer, core: StubCore, key: str) -> None:
    server.extensions.memory.register("r", key, offset=0, byte_size=SIZE)
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        answers: list[Any] = []
        client.start_stream(callback=lambda result, error: answers.append(error or result))
        inputs = [shared(triton_grpc, "INPUT0", "r", 8), shared(triton_grpc, "INPUT1", "r", 8, 8)]
        client.async_stream_infer("add_two", inputs, outputs=[shared_output(triton_grpc, "r", 8, 128)])
        client.async_stream_infer("add_two", inputs, outputs=[shared_output(triton_grpc, "r", 4, 256)])
        client.stop_stream()
    server.extensions.memory.unregister("r")
    assert content(key, 128, 2) == [11, 22]
    failures = [str(answer) for answer in answers if isinstance(answer, Exception)]
    assert len(answers) == 2
    assert len(failures) == 1
    assert "should be at least 8 bytes" in failures[0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("r", "/no-such-object", 0, 4), InternalError, "Unable to open shared memory region: '/no-such-object'"),
        (("r", "/../etc/passwd", 0, 4), InternalError, "Unable to open shared memory region: '/../etc/passwd'"),
        (("r", "", 0, 4), InternalError, "Unable to open shared memory region: ''"),
        (("r", "..", 0, 4), InternalError, "Unable to open shared memory region"),
        (("r", "a\0b", 0, 4), InternalError, "Unable to open shared memory region"),
        (("r", "x" * 10_000, 0, 4), InternalError, "Unable to open shared memory region"),
        (("r", "KEY", 0, SIZE + 1), InvalidArgument, "failed to register shared memory region 'r': invalid args"),
        (("r", "KEY", SIZE, 1), InvalidArgument, f"has {SIZE} bytes, but offset {SIZE} and byte_size 1"),
        (("r", "KEY", 2**64 - 1, 2**64 - 1), InvalidArgument, "invalid args"),
        (("r", "KEY", 0, 0), InvalidArgument, "byte_size must be at least 1"),
        (("", "KEY", 0, 4), InvalidArgument, "must have a name"),
        (("", "", 0, 0), InternalError, "Unable to open shared memory region: ''"),
        (("r" * 257, "KEY", 0, 4), InvalidArgument, "at most 256 characters"),
        (("r", "triton_python_backend_shm_region_1", 0, 4), InvalidArgument, "reserved for the server"),
    ],
)
def test_regions_that_cannot_be_registered(
    key: str, arguments: tuple[str, str, int, int], error: type[Exception], words: str
) -> None:
    memory = SharedMemory(allowed=True)
    name, asked, offset, size = arguments
    before = times_open(key)
    with pytest.raises(error) as caught:
        memory.register(name, key if asked == "KEY" else asked, offset=offset, byte_size=size)
    assert words in str(caught.value)
    assert memory.status() == []
    assert times_open(key) == before


def test_the_number_of_regions_is_limited(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (SHARE_OF_FILES * 3 + 1, -1))
    memory = SharedMemory(allowed=True)
    before = times_open(key)
    for number in range(3):
        memory.register(f"r{number}", key, offset=0, byte_size=4)
    with pytest.raises(ResourceExhausted, match="3 shared memory regions are registered, the maximum"):
        memory.register("r3", key, offset=0, byte_size=4)
    assert times_open(key) == before + 3
    memory.unregister("r1")
    memory.register("r3", key, offset=0, byte_size=4)
    memory.unregister_all()
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY, -1))
    assert max_regions() == MAX_REGIONS


def test_nothing_is_registered_or_used_unless_the_server_allows_it(wire: Any, key: str) -> None:
    inputs = [shared(wire, "INPUT0", "in", 8), shared(wire, "INPUT1", "in", 8, 8)]
    before = times_open(key)
    with running_server(StubCore, allows_shared_memory=False) as server:
        with wire.InferenceServerClient(server.grpc if wire is triton_grpc else server.http) as client:
            refused: list[Callable[[], Any]] = [
                lambda: client.register_system_shared_memory("in", key, 16),
                lambda: client.register_cuda_shared_memory("in", b64encode(b"handle"), 0, 16),
                lambda: client.unregister_system_shared_memory("in"),
                lambda: client.unregister_system_shared_memory(),
                lambda: client.unregister_cuda_shared_memory(),
                lambda: client.infer("add_two", inputs),
                lambda: client.infer("add_two", [], outputs=[shared_output(wire, "in", 8)]),
            ]
            for call in refused:
                with pytest.raises(InferenceServerException, match="Client shared memory is disabled") as caught:
                    call()
                assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")
                assert "'--allow-client-shm=true'" in str(caught.value)
            assert "in" not in str(client.get_system_shared_memory_status())
        assert times_open(key) == before


def test_links_and_pipes_are_no_shared_memory(key: str) -> None:
    memory = SharedMemory(allowed=True)
    link, pipe = f"{key}-link", f"{key}-pipe"
    os.symlink("/etc/passwd", f"/dev/shm{link}")
    os.mkfifo(f"/dev/shm{pipe}")
    try:
        for path in (link, pipe):
            with pytest.raises(InternalError, match="Unable to open"):
                memory.register("r", path, offset=0, byte_size=1)
    finally:
        os.unlink(f"/dev/shm{link}")
        os.unlink(f"/dev/shm{pipe}")


def test_an_object_lives_until_its_region_is_forgotten(key: str) -> None:
    memory = SharedMemory(allowed=True)
    before = times_open(key)
    memory.register("r", key, offset=4, byte_size=8)
    assert times_open(key) == before + 1
    with pytest.raises(AlreadyExists):
        memory.register("r", key, offset=4, byte_size=8)
    assert np.frombuffer(memory.read(Place("r", 4)), np.float32).tolist() == [2]
    memory.unregister_all()
    with pytest.raises(NotFound):
        memory.read(Place("r", 4))
    assert times_open(key) == before


def grpc_input(**parameters: Any) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="floats")
    tensor = request.inputs.add(name="X", datatype="FP32", shape=[2])
    for name, value in parameters.items():
        kind = {str: "string_param", int: "int64_param", bool: "bool_param"}[type(value)]
        setattr(tensor.parameters[name], kind, value)
    return request


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"shared_memory_region": 5}, "'shared_memory_region' parameter for tensor 'X', expected string_param."),
        ({"shared_memory_region": "in"}, "'shared_memory_byte_size' must be specified along with"),
        (
            {"shared_memory_region": "in", "shared_memory_byte_size": "8"},
            "'shared_memory_byte_size' parameter for tensor 'X', expected int64_param.",
        ),
        (
            {"shared_memory_region": "in", "shared_memory_byte_size": 8, "shared_memory_offset": -4},
            "Unable to find shared memory region: 'in'",
        ),
    ],
)
def test_parameters_of_the_wrong_type_over_grpc(
    server: RunningServer, core: StubCore, parameters: dict[str, Any], words: str
) -> None:
    with triton_grpc.InferenceServerClient(server.grpc) as client, pytest.raises(Exception) as caught:
        client._client_stub.ModelInfer(grpc_input(**parameters))
    assert words in str(caught.value)


def test_cuda_shared_memory_is_refused(server: RunningServer, core: StubCore) -> None:
    refusals: list[Callable[[], Any]] = []
    with triton_grpc.InferenceServerClient(server.grpc) as rpc, triton_http.InferenceServerClient(server.http) as http:
        refusals = [
            lambda: rpc.register_cuda_shared_memory("c", b64encode(b"handle"), 0, 64),
            lambda: http.register_cuda_shared_memory("c", b64encode(b"handle"), 0, 64),
        ]
        for refusal in refusals:
            with pytest.raises(InferenceServerException, match=r"CUDA shared memory is not available.*system shared"):
                refusal()
        assert http.get_cuda_shared_memory_status() == []
        assert not rpc.get_cuda_shared_memory_status().regions
        for client in (rpc, http):
            client.unregister_cuda_shared_memory()
            with pytest.raises(InferenceServerException, match="Unable to find cuda shared memory region: 'c'"):
                client.get_cuda_shared_memory_status("c")


def test_memory_that_runs_out_is_told(client: Any, wire: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take fewer bytes than it was given."""
    client.register_system_shared_memory("out", key, SIZE)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: whole(file, data[:3], place))
    plain = [wire.InferInput(name, [1, 2], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in plain:
        tensor.set_data_from_numpy(X)
    client.infer("add_two", plain, outputs=[shared_output(wire, "out", 8)])
    with open(f"/dev/shm{key}", "rb") as file:
        assert np.frombuffer(file.read(8), np.float32).tolist() == [2, 4]

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InferenceServerException, match="'OUTPUT0' does not fit into shared memory: No space left"):
        client.infer("add_two", plain, outputs=[shared_output(wire, "out", 8)])
