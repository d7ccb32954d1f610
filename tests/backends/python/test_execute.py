"""`TritonPythonModel.execute` in all its forms, and what the API hands to it."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest

from llmserve.errors import Code, InternalError, InvalidArgument, LlmserveError
from llmserve.serving.types import Tensor
from tests.serving.models import appears, collect, floats, request, serving, single, tensors, values, write_model

ADD = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "B").as_numpy()
            a += b  # a model may change what it gets
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a)]))
        return responses
"""
ADD_CONFIG = (
    f'backend: "python"\n{tensors("input", A="FP32 [ -1 ]", B="FP32 [ -1 ]")}\n{tensors("output", SUM="FP32 [ -1 ]")}'
)
ECHO_CONFIG = f'backend: "python"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="FP32 [ -1 ]")}\n'
TEXT_CONFIG = f'backend: "python"\n{tensors("input", X="STRING [ -1 ]")}\n{tensors("output", Y="STRING [ -1 ]")}\n'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def echo_model(body: str) -> str:
    """A model whose `answer(request)` gives each response."""
    return (
        "import numpy as np\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [self.answer(request) for request in requests]\n"
        f"    def answer(self, request):\n        x = request.inputs()[0].as_numpy()\n        {body}\n"
    )


async def test_adds_two_tensors_and_leaves_the_clients_arrays_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "add", ADD_CONFIG, ADD)
    a = floats(1, 2, name="A")
    async with serving(tmp_path) as core:
        response = await single(core, request("add", a, floats(10, 20, name="B"), request_id="r1"))
    assert values(response, "SUM") == [11, 22]
    assert (response.model_name, response.model_version, response.request_id) == ("add", "1", "r1")
    assert response.final
    assert a.data.tolist() == [1, 2]


async def test_read_only_input_can_be_changed_by_the_model(tmp_path: Path) -> None:
    write_model(tmp_path, "add", ADD_CONFIG, ADD)
    a = Tensor("A", "FP32", np.frombuffer(np.ones(2, np.float32).tobytes(), np.float32))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("add", a, floats(1, 1, name="B"))), "SUM") == [2, 2]


async def test_strings_arrive_as_bytes_and_may_leave_as_text(tmp_path: Path) -> None:
    body = """
        assert all(type(element) is bytes for element in x)
        words = np.array([x[0].decode() + "!", "näh", b"raw", 1.5, True], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", words)])"""
    write_model(tmp_path, "text", TEXT_CONFIG, echo_model(body))
    async with serving(tmp_path) as core:
        given = Tensor("X", "BYTES", np.array([b"hi"], dtype=object))
        response = await single(core, request("text", given))
    assert values(response) == [b"hi!", "näh".encode(), b"raw", b"1.5", b"True"]


async def test_numpy_text_dtypes_become_bytes(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "text",
        TEXT_CONFIG,
        echo_model('return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(["a", "bc"]))])'),
    )
    async with serving(tmp_path) as core:
        response = await single(core, request("text", Tensor("X", "BYTES", np.array([b""], dtype=object))))
    assert response.outputs[0].datatype == "BYTES"
    assert values(response) == [b"a", b"bc"]


async def test_sent_array_may_be_reused_by_the_model(tmp_path: Path) -> None:
    code = """
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, out = request.get_response_sender(), np.zeros(1, np.float32)
            for i in range(3):
                out[0] = i
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", out)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "repeat", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core:
        responses = await collect(core, request("repeat", floats(0)))
    assert [values(response) for response in responses[:-1]] == [[0], [1], [2]]
    assert [response.final for response in responses] == [False, False, False, True]
    assert responses[-1].outputs == ()


async def test_final_flag_with_the_last_response(tmp_path: Path) -> None:
    code = """
import threading
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(), request.inputs()[0])).start()
    def answer(self, sender, x):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy())]))
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy() + 1)]),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "threads", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core:
        responses = await collect(core, request("threads", floats(5)))
    assert [(values(response), response.final) for response in responses] == [([5], False), ([6], True)]


async def test_async_execute(tmp_path: Path) -> None:
    code = """
import asyncio
import gc
class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""
    write_model(tmp_path, "later", ECHO_CONFIG, code)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("later", floats(3)))) == [6]


@pytest.mark.parametrize("decoupled", [False, True])
async def test_async_execute_behind_a_decorator(tmp_path: Path, decoupled: bool) -> None:
    """Triton looks at what it returns."""
    code = f"""
import asyncio
def traced(method):
    return lambda *arguments: method(*arguments)
class TritonPythonModel:
    @traced
    async def execute(self, requests):
        await asyncio.sleep(0)
        responses = [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
        if not {decoupled}:
            return responses
        for request, response in zip(requests, responses):
            request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    write_model(tmp_path, "m", ECHO_CONFIG + DECOUPLED * decoupled, code)
    async with serving(tmp_path) as core:
        for value in (1, 2):
            assert values(await single(core, request("m", floats(value)))) == [value]


async def test_async_decoupled_requests_run_side_by_side(tmp_path: Path) -> None:
    code = """
import asyncio
class TritonPythonModel:
    def initialize(self, args):
        self.arrived, self.all_here = 0, asyncio.Event()
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            self.arrived += 1
            if self.arrived == 8:
                self.all_here.set()
            await asyncio.wait_for(self.all_here.wait(), 60)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", request.inputs()[0].as_numpy())]), flags=1)
"""
    write_model(tmp_path, "later", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core:
        answers = await asyncio.gather(*(single(core, request("later", floats(i))) for i in range(8)))
    assert [values(answer) for answer in answers] == [[i] for i in range(8)]


async def test_exception_fails_this_batch_and_says_where(tmp_path: Path) -> None:
    body = """
        if x[0] < 0:
            raise ValueError("boom")
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])"""
    directory = write_model(tmp_path, "fail", ECHO_CONFIG, echo_model(body))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError) as failure:
            await single(core, request("fail", floats(-1)))
        assert values(await single(core, request("fail", floats(1)))) == [1]
    text = str(failure.value)
    assert text.startswith("Failed to process the request(s) for model 'fail_0', message: ValueError: boom\n\nAt:\n")
    assert re.search(rf"  {directory}/1/model.py\(\d+\): answer\n  .*\(\d+\): <listcomp>\n  .*\(\d+\): execute\n", text)
    assert "llmserve/backends" not in text


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        (
            "[]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
        ),
        (
            "[None]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type "
            "'<class 'NoneType'>'.",
        ),
        ("exit()", "SystemExit: None"),
    ],
)
async def test_wrong_return_is_an_error_and_not_a_hang(tmp_path: Path, answer: str, problem: str) -> None:
    write_model(
        tmp_path,
        "bad",
        ECHO_CONFIG,
        f"class TritonPythonModel:\n    def execute(self, requests):\n        return {answer}\n",
    )
    async with serving(tmp_path) as core, asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(InternalError) as failure:
                await single(core, request("bad", floats(1)))
            assert f"Failed to process the request(s) for model 'bad_0', message: {problem}" in str(failure.value)
        assert core.ready()


async def test_one_bad_response_spares_the_others_of_its_batch(tmp_path: Path) -> None:
    body = """
        y = x if x[0, 0] else np.array([['\\ud800']], dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])"""
    code = echo_model(body)
    config = (
        ECHO_CONFIG
        + "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: 2 }"
    )
    write_model(tmp_path, "half", config, code)
    async with serving(tmp_path) as core:
        bad, good = await asyncio.gather(
            collect(core, request("half", Tensor("X", "FP32", np.zeros((1, 1), np.float32)))),
            collect(core, request("half", Tensor("X", "FP32", np.ones((1, 1), np.float32)))),
        )
        await collect(
            core, request("half", Tensor("X", "FP32", np.ones((1, 1), np.float32)))
        )  # so the first is counted
        assert 2 in [batch.batch_size for batch in core.statistics("half")[0].batch_stats]
    assert bad[0].error is not None
    assert "element 0 of tensor 'Y' cannot be made text" in str(bad[0].error)
    assert values(good[0]) == [[1]]


@pytest.mark.parametrize(
    ("code_name", "code"), [("INVALID_ARG", Code.INVALID_ARGUMENT), ("UNSUPPORTED", Code.UNIMPLEMENTED)]
)
async def test_triton_error_is_passed_on_verbatim(tmp_path: Path, code_name: str, code: Code) -> None:
    body = f"return pb_utils.InferenceResponse([], pb_utils.TritonError('no good', pb_utils.TritonError.{code_name}))"
    write_model(tmp_path, "refuse", ECHO_CONFIG, echo_model(body))
    async with serving(tmp_path) as core:
        with pytest.raises(LlmserveError, match=r"^no good$") as failure:
            await single(core, request("refuse", floats(1)))
    assert failure.value.code is code


async def test_error_without_code_is_internal(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "refuse",
        ECHO_CONFIG,
        echo_model("return pb_utils.InferenceResponse(error=pb_utils.TritonError('x'))"),
    )
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match=r"^x$"):
            await single(core, request("refuse", floats(1)))


async def test_dropped_sender_ends_the_request(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(pb_utils.InferenceResponse([request.inputs()[0]]))
"""
    write_model(tmp_path, "forgets", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core, asyncio.timeout(30):
        responses = await collect(core, request("forgets", floats(1)))
    assert len(responses) == 2
    assert "TRITONSERVER_RESPONSE_COMPLETE_FINAL" in str(responses[1].error)


async def test_error_in_the_middle_of_a_decoupled_answer(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
        sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("hiccup")))
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        raise RuntimeError("and out")
"""
    write_model(tmp_path, "hiccup", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core:
        hiccup, data, end = await collect(core, request("hiccup", floats(1)))
    assert (str(hiccup.error), hiccup.final) == ("hiccup", False)
    assert values(data) == [1]
    assert "RuntimeError: and out" in str(end.error)
    assert end.final


async def test_what_a_request_says_about_itself(tmp_path: Path) -> None:
    body = """
        import json
        seen = dict(id=request.request_id(), correlation=request.correlation_id(), timeout=request.timeout(),
                    flags=request.flags(), outputs=request.requested_output_names(), cancelled=request.is_cancelled(),
                    parameters=json.loads(request.parameters()), model=request.model_name())
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([json.dumps(seen)], dtype=object))])"""
    config = (
        f'backend: "python"\n{tensors("input", X="FP32 [ -1 ]")}\n{tensors("output", Y="STRING [ 1 ]", Z="FP32 [ 1 ]")}'
    )
    write_model(tmp_path, "who", config, echo_model(body))
    async with serving(tmp_path) as core:
        full = request(
            "who", floats(1), request_id="r7", timeout_us=5, sequence_id=9, sequence_end=True,
            requested_outputs=("Y",), parameters={"a": 1, "b": "x"},
        )  # fmt: skip
        seen = json.loads(values(await single(core, full))[0])
        plain = json.loads(values(await single(core, request("who", floats(1))))[0])
    assert seen == {
        "id": "r7", "correlation": 9, "timeout": 5, "flags": 2, "outputs": ["Y"], "cancelled": False,
        "parameters": {"a": 1, "b": "x"}, "model": "who",
    }  # fmt: skip
    assert plain["outputs"] == ["Y", "Z"]


async def test_cancellation_reaches_the_running_model(tmp_path: Path) -> None:
    code = """
import time, pathlib
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
        for step in range(2000):
            if sender.is_cancelled() and request.is_cancelled():
                pathlib.Path(__file__).with_name("cancelled").write_text(str(step))
                break
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
            time.sleep(0.005)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    directory = write_model(tmp_path, "slow", ECHO_CONFIG + DECOUPLED, code)
    async with serving(tmp_path) as core:
        async with aclosing(core.infer_stream(request("slow", floats(1)))) as stream:
            async for _ in stream:
                break
        assert await appears(directory / "1" / "cancelled")
        assert int((directory / "1" / "cancelled").read_text()) < 200
        assert 'nv_inference_request_failure{model="slow",reason="CANCELED",version="1"} 1' in core.metrics_text()


async def test_hung_model_blocks_neither_others_nor_the_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.backends.python.instance.FINALIZE_TIMEOUT_S", 0.1)
    write_model(tmp_path, "hung", ECHO_CONFIG, "import time\n" + echo_model("time.sleep(30)"))
    write_model(tmp_path, "add", ADD_CONFIG, ADD)
    async with asyncio.timeout(25), serving(tmp_path, drain_s=0.1) as core:
        stuck = asyncio.create_task(collect(core, request("hung", floats(1))))
        await asyncio.sleep(0.05)
        assert values(await single(core, request("add", floats(1, name="A"), floats(2, name="B"))), "SUM") == [3]
    (response,) = await stuck
    assert "hung_0' has been unloaded" in str(response.error)


async def test_bf16_has_no_numpy_form(tmp_path: Path) -> None:
    config = f'backend: "python"\n{tensors("input", X="BF16 [ -1 ]")}\n{tensors("output", Y="BF16 [ -1 ]")}'
    code = """
class TritonPythonModel:
    def execute(self, requests):
        x = requests[0].inputs()[0]
        if x.shape() == [1]:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x.as_numpy())])]
        return [pb_utils.InferenceResponse([x])]
"""
    write_model(tmp_path, "brain", config, code.replace("[x])", "[x])"))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match="BF16 and cannot be converted to NumPy"):
            await single(core, request("brain", Tensor("X", "BF16", np.array([1], np.uint16))))
        given = Tensor("X", "BF16", np.array([1, 2], np.uint16))
        response = await collect(core, request("brain", given))
    assert response[0].final


async def test_dlpack_round_trip(tmp_path: Path) -> None:
    body = 'return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", x + 1)])'
    write_model(
        tmp_path,
        "dl",
        ECHO_CONFIG,
        echo_model("assert 'dltensor' in repr(request.inputs()[0].to_dlpack())\n        " + body),
    )
    async with serving(tmp_path) as core:
        assert values(await single(core, request("dl", floats(1)))) == [2]


async def test_dlpack_capsule_as_torch_makes_it(tmp_path: Path) -> None:
    body = 'return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("Y", (x + 1).__dlpack__())])'
    write_model(tmp_path, "dl", ECHO_CONFIG, echo_model(body))
    write_model(tmp_path, "junk", ECHO_CONFIG, echo_model(body.replace("(x + 1).__dlpack__()", "'junk'")))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("dl", floats(1)))) == [2]
        with pytest.raises(InternalError, match="tensor 'Y' cannot be read through DLPack"):
            await single(core, request("junk", floats(1)))


async def test_invalid_request_never_reaches_the_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", ECHO_CONFIG, echo_model("open(__file__ + '.ran', 'w')"))
    async with serving(tmp_path) as core:
        with pytest.raises(InvalidArgument):
            await single(core, request("m", floats(1, name="Q")))
    assert not (directory / "1" / "model.py.ran").exists()


SLEEPER = """
import time
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.ran = []

    def execute(self, requests):
        x = float(requests[0].inputs()[0].as_numpy()[0])
        self.ran.append(x)
        time.sleep(x if x < 1 else 0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(self.ran, dtype=np.float32))])]
"""


@pytest.mark.parametrize(("brief_ns", "num_pending"), [(10**12, 0), (0, 2)])
async def test_brief_executions_are_handed_over_ahead_and_may_still_be_cancelled(
    brief_ns: int, num_pending: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.backends.python.instance.BRIEF_NS", brief_ns)
    write_model(tmp_path, "m", ECHO_CONFIG, SLEEPER)
    async with serving(tmp_path) as core:
        for _ in range(20):
            await single(core, request("m", floats(1)))
        slow = asyncio.create_task(single(core, request("m", floats(0.2))))
        await asyncio.sleep(0.02)
        waiting = [asyncio.create_task(single(core, request("m", floats(number)))) for number in (2, 3, 4)]
        await asyncio.sleep(0.02)
        waiting[1].cancel()
        await asyncio.sleep(0.01)
        assert f'nv_inference_pending_request_count{{model="m",version="1"}} {num_pending}' in core.metrics_text()
        await slow
        last = await waiting[2]
    assert values(last, "Y")[-3:] == [pytest.approx(0.2), 2, 4]


FORGETFUL = """
import weakref
import numpy as np

class TritonPythonModel:
    last = None

    def execute(self, requests):
        lives = self.last is not None and self.last() is not None
        self.last = weakref.ref(requests[0])
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            raise ValueError("negative")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([lives], dtype=np.float32))])]
"""


async def test_a_request_that_failed_is_forgotten_at_once(tmp_path: Path) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG, FORGETFUL)
    async with serving(tmp_path) as core:
        gc.disable()  # its tensors must not wait for the collector
        try:
            with pytest.raises(LlmserveError, match="negative"):
                await single(core, request("m", floats(-1)))
            assert values(await single(core, request("m", floats(1))), "Y") == [0]
        finally:
            gc.enable()
