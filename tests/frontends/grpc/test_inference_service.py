"""The gRPC front end, with tritonclient and with hand-made messages."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

from llmserve.frontends.grpc.inference_service import start_grpc
from tests.frontends.server import HOST, RunningServer, settled, wait_until
from tests.frontends.stub_core import StubCore


def tensor(name: str, data: np.ndarray[Any, Any]) -> triton.InferInput:
    made = triton.InferInput(name, list(data.shape), np_to_triton_dtype(data.dtype))
    made.set_data_from_numpy(data)
    return made


def message(model: str = "echo", **fields: Any) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(model_name=model, **fields)


def typed(
    name: str, datatype: str, shape: list[int], **contents: Any
) -> service_pb2.ModelInferRequest.InferInputTensor:
    return service_pb2.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=service_pb2.InferTensorContents(**contents)
    )


def count_request(n: int, request_id: str = "", **inputs: int) -> service_pb2.ModelInferRequest:
    tensors = [typed(name, "INT32", [1, 1], int_contents=[value]) for name, value in {"N": n, **inputs}.items()]
    return message("count", id=request_id, inputs=tensors)


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as made:
        yield made


@pytest.fixture
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_health_and_metadata(client: triton.InferenceServerClient, core: StubCore) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("add_two")
    assert not client.is_model_ready("nope")
    assert not client.is_model_ready("add_two", "9")
    assert client.get_server_metadata().name == "stub"
    assert list(client.get_server_metadata().extensions) == ["binary_tensor_data", "generate"]
    assert [entry.name for entry in client.get_model_metadata("add_two").inputs] == ["INPUT0", "INPUT1"]
    assert client.get_model_config("count").config.model_transaction_policy.decoupled
    assert client.get_inference_statistics("echo").model_stats[0].inference_count == 2**40
    core.is_ready = False
    assert not client.is_server_ready()


def test_repository_index_can_be_limited_to_ready_models(
    client: triton.InferenceServerClient, stub: service_pb2_grpc.GRPCInferenceServiceStub
) -> None:
    rows = client.get_model_repository_index().models
    assert [(row.name, row.state, row.reason) for row in rows] == [
        ("add_two", "READY", ""), ("wreck", "UNAVAILABLE", "it is broken"),
    ]  # fmt: skip
    ready = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True)).models
    assert [row.name for row in ready] == ["add_two"]


def test_standard_health_service(server: RunningServer, core: StubCore) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"") == b"\x08\x01"
        assert check(b"\x0a\x03any") == b"\x08\x01"
        core.is_ready = False
        assert check(b"") == b"\x08\x02"


def test_infer_adds_two_tensors(client: triton.InferenceServerClient) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    result = client.infer("add_two", [tensor("INPUT0", x), tensor("INPUT1", x * 10)], request_id="r1")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), x * 11)
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("add_two", "1", "r1")


@pytest.mark.parametrize(
    "data",
    [
        np.array([True, False]),
        np.array([-128, 127], dtype=np.int8),
        np.array([[1], [2]], dtype=np.uint16),
        np.array([2**63 - 1], dtype=np.int64),
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([1.5, np.inf], dtype=np.float16),
        np.array([1e-300], dtype=np.float64),
        np.array([[b"a", b"\x00\xff", "Ж".encode()]], dtype=np.object_),
        np.empty((0, 3), dtype=np.float32),
    ],
    ids=lambda data: str(data.dtype),
)
def test_every_datatype_survives_the_round_trip(client: triton.InferenceServerClient, data: Any) -> None:
    result = client.infer("echo", [tensor("X", data)]).as_numpy("X")
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result, data)


def test_bfloat16_travels_as_its_bit_pattern(stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore) -> None:
    request = message(raw_input_contents=[b"\x80\x3f\x00\xc0"])
    request.inputs.add(name="X", datatype="BF16", shape=[2])
    assert stub.ModelInfer(request).raw_output_contents[0] == b"\x80\x3f\x00\xc0"
    assert core.requests[0].inputs["X"].data.tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize(
    ("datatype", "contents"),
    [
        ("BOOL", {"bool_contents": [True, False]}),
        ("INT8", {"int_contents": [-1, 5]}),
        ("INT64", {"int64_contents": [2**62, 0]}),
        ("UINT8", {"uint_contents": [255, 0]}),
        ("UINT64", {"uint64_contents": [2**63, 0]}),
        ("FP32", {"fp32_contents": [0.5, -1]}),
        ("FP64", {"fp64_contents": [0.1, 0.2]}),
        ("BYTES", {"bytes_contents": [b"x", b"\xff"]}),
    ],
)
def test_typed_contents(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore, datatype: str, contents: dict[str, list[Any]]
) -> None:
    stub.ModelInfer(message(inputs=[typed("X", datatype, [2, 1], **contents)]))
    received = core.requests[0].inputs["X"]
    assert (received.datatype, received.shape) == (datatype, (2, 1))
    assert received.data.reshape(-1).tolist() == next(iter(contents.values()))


@pytest.mark.parametrize(
    ("request_message", "words"),
    [
        (
            message(inputs=[typed("X", "FP32", [1], fp32_contents=[1])], raw_input_contents=[b"1234"]),
            "contents field must not be specified when using raw_input_contents for 'X' for model 'echo'",
        ),
        (
            message(inputs=[typed("X", "FP32", [1], int_contents=[1])]),
            "unexpected explicit tensor data for input tensor 'X' for model 'echo' of type 'INT32', "
            "expected datatype 'FP32'",
        ),
        (message(inputs=[typed("X", "FP16", [1], fp32_contents=[1])]), "of type 'FP32', expected datatype 'FP16'"),
        (message(inputs=[typed("X", "FP32", [1])]), "unable to find data for input tensor 'X' for model 'echo'"),
        (message(inputs=[typed("X", "FP32", [2], fp32_contents=[1])]), "input byte size mismatch"),
        (message(inputs=[typed("X", "INT8", [1], int_contents=[300])]), "is out of range for INT8"),
        (message(inputs=[typed("X", "FP32", [-1], fp32_contents=[1])]), "negative dimension"),
        (message(inputs=[typed("X", "FP32", [0, 2**62, 2**62])]), "unusable shape"),
        (message(inputs=[typed("X", "FP32", [1] * 70, fp32_contents=[1])]), "unusable shape of 70 dimensions"),
        (message(inputs=[typed("X", "FP32", [2**62] * 40_000)]), "unusable shape of 40000 dimensions"),
        (message(inputs=[typed("X", "FP32", [2**62] * 64)]), "it has too many elements"),
        (message(inputs=[typed("TEXT", "fp32", [1])]), "'<invalid>', but model 'echo' expects 'BYTES'"),
        (message(inputs=[typed("TEXT", "TYPE_INT64", [1])]), "unknown datatype 'TYPE_INT64'; write INT64"),
        (message(inputs=[typed("X", "FP32", [0]), typed("X", "FP32", [0])]), "input 'X' already exists in request"),
        (message(model_version="abc"), "failed to get model version from specified version string 'abc'"),
        (message(model_version="9" * 30), "version should be an integral value > 0"),
        (
            message(parameters={"p": service_pb2.InferParameter()}),
            "invalid value type for 'p' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            message(parameters={"sequence_id": service_pb2.InferParameter(bool_param=True)}),
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            message(parameters={"triton_mine": service_pb2.InferParameter(bool_param=True)}),
            "parameter keys starting with 'triton_' are reserved",
        ),
    ],
)
def test_bad_messages_are_refused(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, request_message: Any, words: str
) -> None:
    code, details = failure(lambda: stub.ModelInfer(request_message))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


@pytest.mark.parametrize(
    ("raw", "datatype", "words"),
    [
        (b"12345678", "FP32", "input byte size mismatch for input 'X' for model 'echo'. Expected 4, got 8"),
        (b"\x01\x00", "BYTES", "incomplete string length indicator for inference input 'X'"),
        (b"\x05\x00\x00\x00ab", "BYTES", "incomplete string data for inference input 'X'"),
        (b"", "BYTES", "expected 1 string elements for inference input 'X' for model 'echo', got 0"),
        (b"\x00\x00\x00\x00" * 2, "BYTES", "unexpected number of string elements 2"),
    ],
)
def test_bad_raw_bytes_are_refused(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, raw: bytes, datatype: str, words: str
) -> None:
    request = message(raw_input_contents=[raw])
    request.inputs.add(name="X", datatype=datatype, shape=[1])
    code, details = failure(lambda: stub.ModelInfer(request))
    assert (code, words in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


def test_an_input_without_its_raw_bytes_is_refused_and_extra_bytes_are_ignored(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    request = message(raw_input_contents=[b"\x01"])
    request.inputs.add(name="X", datatype="INT8", shape=[1])
    request.inputs.add(name="Y", datatype="INT8", shape=[1])
    assert "unable to find data for input tensor 'Y'" in failure(lambda: stub.ModelInfer(request))[1]
    request.raw_input_contents.extend([b"\x02", b"\x03"])
    assert list(stub.ModelInfer(request).raw_output_contents) == [b"\x01", b"\x02"]


def test_errors_carry_the_core_s_code_and_text(stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore) -> None:
    unknown = failure(lambda: stub.ModelInfer(message("nope")))
    assert unknown == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found")
    assert failure(lambda: stub.ModelInfer(message("echo", model_version="9")))[0] is grpc.StatusCode.NOT_FOUND
    assert failure(lambda: stub.ModelInfer(message("broken"))) == (grpc.StatusCode.INTERNAL, "boom")
    decoupled = failure(lambda: stub.ModelInfer(count_request(1)))
    assert decoupled == (
        grpc.StatusCode.UNIMPLEMENTED,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )
    core.is_ready = False
    assert failure(lambda: stub.ModelInfer(message()))[0] is grpc.StatusCode.UNAVAILABLE


def test_parameters_reach_their_fields(client: triton.InferenceServerClient, core: StubCore) -> None:
    client.infer(
        "echo", [], sequence_id="s-1", sequence_start=True, priority=3, timeout=5000, request_id="r",
        parameters={"name": "x", "flag": True, "number": 7},
    )  # fmt: skip
    request = core.requests[0]
    assert (request.sequence_id, request.sequence_start, request.sequence_end) == ("s-1", True, False)
    assert (request.priority, request.timeout_us, request.request_id) == (3, 5000, "r")
    assert request.parameters == {"name": "x", "flag": True, "number": 7}


def test_requested_outputs_are_passed_on_once(client: triton.InferenceServerClient, core: StubCore) -> None:
    x = np.zeros(1, dtype=np.int32)
    wanted = [triton.InferRequestedOutput("B"), triton.InferRequestedOutput("B")]
    result = client.infer("echo", [tensor("A", x), tensor("B", x)], outputs=wanted)
    assert core.requests[0].requested_outputs == ("B",)
    assert result.as_numpy("A") is None


def test_response_parameters_keep_their_types(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    sent = {
        "i": service_pb2.InferParameter(int64_param=-5),
        "u": service_pb2.InferParameter(uint64_param=2**63),
        "d": service_pb2.InferParameter(double_param=0.5),
        "s": service_pb2.InferParameter(string_param="x"),
        "b": service_pb2.InferParameter(bool_param=False),
    }
    assert dict(stub.ModelInfer(message(parameters=sent)).parameters) == sent


def test_cancelling_a_unary_call_closes_the_stream(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore
) -> None:
    call = stub.ModelInfer.future(message("slow"))
    wait_until(lambda: core.running == 1)
    call.cancel()
    wait_until(lambda: core.running == 0)


def test_a_deadline_reaches_the_core_and_closes_the_stream(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore
) -> None:
    code, _ = failure(lambda: stub.ModelInfer(message("slow"), timeout=1))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert core.requests[0].deadline is not None
    wait_until(lambda: core.running == 0)
    stub.ModelInfer(message())
    assert core.requests[1].deadline is None


class Stream:
    """A `ModelStreamInfer` call fed by hand."""

    def __init__(self, stub: service_pb2_grpc.GRPCInferenceServiceStub, **options: Any) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self.call = stub.ModelStreamInfer(iter(self._requests.get, None), **options)

    def send(self, *requests: service_pb2.ModelInferRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def half_close(self) -> list[service_pb2.ModelStreamInferResponse]:
        self._requests.put(None)
        return list(self.call)


def values(responses: list[service_pb2.ModelStreamInferResponse], request_id: str) -> list[int]:
    return [
        int.from_bytes(each.infer_response.raw_output_contents[0], "little")
        for each in responses
        if each.infer_response.id == request_id and each.infer_response.raw_output_contents
    ]


def is_final(response: service_pb2.ModelStreamInferResponse) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


def test_stream_of_a_decoupled_model(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    stream.send(count_request(3, "a"))
    responses = stream.half_close()
    assert values(responses, "a") == [0, 1, 2]
    assert [is_final(each) for each in responses] == [False, False, False]
    assert all("triton_final_response" in each.infer_response.parameters for each in responses)
    assert stream.call.code() is grpc.StatusCode.OK


def test_empty_final_response_comes_when_asked_for(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    request = count_request(2, "a")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    stream.send(request)
    last = stream.half_close()[-1].infer_response
    assert (last.id, last.model_name, last.model_version, list(last.outputs)) == ("a", "count", "", [])
    assert last.parameters["triton_final_response"].bool_param


def test_a_request_without_responses_is_silent_by_default(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    stream.send(count_request(0))
    assert stream.half_close() == []


def test_stream_of_an_ordinary_model_is_one_final_response(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    stream.send(message(id="x", inputs=[typed("X", "INT32", [1], int_contents=[9])]))
    (response,) = stream.half_close()
    assert (values([response], "x"), is_final(response)) == ([9], True)


def test_requests_of_one_stream_interleave_and_each_stays_in_order(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    stream = Stream(stub)
    stream.send(*(count_request(50, f"r{index}") for index in range(8)))
    responses = stream.half_close()
    for index in range(8):
        assert values(responses, f"r{index}") == list(range(50))
    first_of_last = next(i for i, each in enumerate(responses) if each.infer_response.id == "r7")
    assert first_of_last < 8 * 49  # not one request after the other


def test_failures_are_in_band_and_the_stream_goes_on(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    stream = Stream(stub)
    early = [
        message("nope", id="e1"),
        message("echo", id="e2", model_version="x"),
        message("echo", id="e3", inputs=[typed("X", "FP32", [1])]),
        count_request(101, "e4"),
    ]
    stream.send(
        *early, message("broken", id="model"), count_request(9, "middle", FAIL_AFTER=2), count_request(2, "fine")
    )
    responses = stream.half_close()
    by_id = {each.infer_response.id: each for each in responses if each.error_message}
    assert sorted(by_id) == ["e1", "e2", "e3", "e4", "middle", "model"]
    assert "unknown model: 'nope'" in by_id["e1"].error_message
    assert by_id["e4"].error_message == "N must be at most 100"
    assert [by_id[f"e{n}"].infer_response.model_name for n in (1, 2, 3, 4)] == ["", "", "", ""]
    assert (by_id["model"].error_message, by_id["model"].infer_response.model_name) == ("boom", "broken")
    assert (values(responses, "middle"), is_final(by_id["middle"])) == ([0, 1], True)
    assert values(responses, "fine") == [0, 1]
    assert stream.call.code() is grpc.StatusCode.OK


def test_cancelling_a_stream_closes_every_request_silently(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(stub)
    stream.send(count_request(-1, "a"), count_request(-1, "b"), message("slow", id="c"))
    next(stream.call)
    wait_until(lambda: core.running == 3)
    stream.call.cancel()
    wait_until(lambda: core.running == 0)
    assert caplog.records == []


def test_a_client_that_vanishes_closes_its_requests(server: RunningServer, core: StubCore) -> None:
    channel = grpc.insecure_channel(server.grpc)
    stream = Stream(service_pb2_grpc.GRPCInferenceServiceStub(channel))
    stream.send(count_request(-1, "a"))
    next(stream.call)
    channel.close()
    wait_until(lambda: core.running == 0)


def test_a_client_that_does_not_read_stops_its_own_request_only(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore
) -> None:
    """An endless stream to a client that never reads: buffers fill, then nothing more is taken from the model."""
    stalled = Stream(stub)
    stalled.send(message("flood", id="big"))
    stopped_at = settled(lambda: core.pulled, at_most=1000)
    other = Stream(stub)
    other.send(count_request(3, "fine"))
    assert values(other.half_close(), "fine") == [0, 1, 2]
    stopped_at = settled(lambda: core.pulled, at_most=1000)  # clients widen their windows with every measurement
    assert core.running == 1
    for _ in range(stopped_at + 1):  # reading makes room
        next(stalled.call)
    wait_until(lambda: core.pulled > stopped_at)
    stalled.call.cancel()
    wait_until(lambda: core.running == 0)


def test_details_are_cut_by_their_encoded_length(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    """A letter of two bytes is six in the header, and clients refuse headers of more than 8 KiB."""
    code, details = failure(lambda: stub.ModelInfer(message("Ж" * 3000)))
    assert code is grpc.StatusCode.NOT_FOUND
    assert details.startswith("Request for unknown model: 'ЖЖЖ")
    assert 3900 < 6 * details.count("Ж") <= 4096


async def test_stopping_lets_running_calls_finish() -> None:
    own = StubCore(slow_s=0.3)
    server = await start_grpc(own, HOST, 0)
    async with grpc.aio.insecure_channel(f"{HOST}:{server.port}") as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message("slow", id="last"))
        running = asyncio.ensure_future(call.code())
        await asyncio.to_thread(wait_until, lambda: own.running == 1)
        await server.stop()
        assert await running is grpc.StatusCode.OK
        assert (await call).id == "last"


def test_a_deadline_ends_a_stream(stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore) -> None:
    stream = Stream(stub, timeout=1)
    stream.send(count_request(-1))
    with pytest.raises(grpc.RpcError) as caught:
        list(stream.call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert core.requests[0].deadline is not None
    wait_until(lambda: core.running == 0)


@pytest.mark.parametrize("model", ["punctual", "slow"])
def test_a_half_closed_stream_ends_with_its_deadline_too(core: StubCore, server: RunningServer, model: str) -> None:
    """The client's own clock must not say it first: the call has its deadline as metadata."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = Stream(stub, metadata=[("grpc-timeout", "200m")])
        stream.send(message(model))
        with pytest.raises(grpc.RpcError) as caught:
            stream.half_close()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: core.running == 0)


def strict(stub: service_pb2_grpc.GRPCInferenceServiceStub, value: str = "true") -> Stream:
    return Stream(stub, metadata=[("triton_grpc_error", value)])


def test_an_error_is_the_status_for_clients_that_want_it_so(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, core: StubCore
) -> None:
    stream = strict(stub)
    stream.send(count_request(-1, "endless"), count_request(9, "middle", FAIL_AFTER=2))
    received = []
    with pytest.raises(grpc.RpcError) as caught:
        received.extend(stream.call)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "broken in the middle")
    wait_until(lambda: core.running == 0)


def test_a_request_that_is_refused_does_not_end_such_a_stream(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    stream = strict(stub)
    stream.send(message("nope", id="e1"), count_request(101, "e2"), count_request(2, "fine"))
    responses = stream.half_close()
    assert sorted(each.infer_response.id for each in responses if each.error_message) == ["e1", "e2"]
    assert values(responses, "fine") == [0, 1]
    assert stream.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("value", ["false", "True", "1"])
def test_only_one_word_asks_for_errors_as_status(stub: service_pb2_grpc.GRPCInferenceServiceStub, value: str) -> None:
    stream = strict(stub, value)
    stream.send(message("broken", id="model"))
    assert [each.error_message for each in stream.half_close()] == ["boom"]


def test_tritonclient_streams(client: triton.InferenceServerClient) -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put((result, error)))
    n = tensor("N", np.array([[2]], dtype=np.int32))
    client.async_stream_infer("count", [n], request_id="a", enable_empty_final_response=True)
    received = [results.get(timeout=10) for _ in range(3)]
    assert [error for _, error in received] == [None] * 3
    assert [result.as_numpy("VALUE").item() for result, _ in received[:2]] == [0, 1]
    assert received[2][0].get_response().parameters["triton_final_response"].bool_param
    client.async_stream_infer("nope", [n])
    assert "unknown model" in str(results.get(timeout=10)[1])
    client.stop_stream()
