"""`EXECUTION_MODE=process`: the same models in processes of their own, and what they cannot do to the server there."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest

from llmserve.backends.python import parameters as python_parameters
from llmserve.backends.python.process import launch
from llmserve.errors import InternalError, Unavailable
from llmserve.serving.core import InferenceCore
from llmserve.serving.types import Tensor
from tests.backends.python.test_execute import DECOUPLED, ECHO_CONFIG, TEXT_CONFIG, echo_model
from tests.backends.python.test_loading import CALLER, COUNT, INNER, reason
from tests.serving.models import appears, collect, floats, request, serving, single, values, write_model


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


PROCESS = parameter("EXECUTION_MODE", "process")
RECKLESS = """
import ctypes, os, pathlib, signal, time
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        with open(pathlib.Path(__file__).with_name("pids"), "a") as file:
            print(os.getpid(), file=file)
    def execute(self, requests):
        return [self.answer(request) for request in requests]
    def answer(self, request):
        x = request.inputs()[0].as_numpy()
        if x[0] == -1:
            ctypes.string_at(0)
        if x[0] == -2:
            os._exit(3)
        if x[0] == -3:
            os.kill(os.getpid(), signal.SIGKILL)
        if x[0] == -4:
            time.sleep(60)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
"""


def pids(directory: Path) -> list[int]:
    return [int(line) for line in (directory / "1/pids").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # of nobody's who is there to reap it
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)


async def test_libraries_can_import_the_file_by_its_name(tmp_path: Path) -> None:
    """As `unittest.main("model")` does."""
    body = """
        import importlib, sys
        model = importlib.import_module("model")
        assert len(sys.argv) == 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + (type(self) is model.TritonPythonModel))])"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, echo_model(body))
    async with serving(tmp_path) as core:
        assert values(await single(core, request("m", floats(1)))) == [2]


async def test_tensors_of_every_size_go_both_ways(tmp_path: Path) -> None:
    """Large ones in shared memory, which is the model's to change."""
    body = """
        import os
        x += 1
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)], parameters={"pid": os.getpid()})"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, echo_model(body))
    async with serving(tmp_path) as core:
        for size in (0, 1, 1000, 16 * 1024 + 1, 3_000_000):
            x = np.arange(size, dtype=np.float32)
            answer = await single(core, request("m", Tensor("X", "FP32", x)))
            assert np.array_equal(answer.outputs[0].data, x + 1)
            assert answer.parameters["pid"] != os.getpid()


async def test_strings_and_errors_go_both_ways(tmp_path: Path) -> None:
    body = """
        if x[0] == b"raise":
            raise ValueError("boom")
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])"""
    write_model(tmp_path, "m", TEXT_CONFIG + PROCESS, echo_model(body))
    async with serving(tmp_path) as core:
        given = Tensor("X", "BYTES", np.array([b"", "ö".encode(), b"\0" * 100_000], dtype=object))
        assert values(await single(core, request("m", given))) == given.data.tolist()
        with pytest.raises(InternalError, match="ValueError: boom"):
            await single(core, request("m", Tensor("X", "BYTES", np.array([b"raise"], dtype=object))))


async def test_a_models_own_kinds_of_text_and_numbers_are_plain(tmp_path: Path) -> None:
    """The server cannot import them."""
    code = echo_model(
        """answer = pb_utils.InferenceRequest("", 0, [pb_utils.Tensor(Name.X, x)], [Name.Y], Name.INNER).exec()
        parameters = {Name.Y: Number.ONE, "half": Half(0.5), "error": str(answer.error())}
        return pb_utils.InferenceResponse([pb_utils.Tensor(Name.Y, x)], parameters=parameters)"""
    )
    kinds = """
from enum import Enum, IntEnum
Name = Enum("Name", {"X": "X", "Y": "Y", "INNER": "inner"}, type=str)
Number = IntEnum("Number", ["ONE"])
Half = type("Half", (float,), {})
"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, kinds + code)
    write_model(tmp_path, "inner", ECHO_CONFIG, INNER)
    async with serving(tmp_path) as core:
        answer = await single(core, request("m", floats(3)))
    assert (values(answer), answer.parameters) == ([3], {"Y": 1, "half": 0.5, "error": "None"})


PICKLE = """
import multiprocessing, pathlib, pickle
import numpy as np
class TritonPythonModel:
    def initialize(self, args):
        self.offset = pickle.loads(pathlib.Path(__file__).with_name("offset.pkl").read_bytes())
    def execute(self, requests):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            x = pool.apply(self.offset.add, [requests[0].inputs()[0].as_numpy()])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
"""
OFFSET = """
import pathlib
import triton_python_backend_utils as pb_utils
class Offset:
    value = 1
    def add(self, x):
        return x + self.value + (pb_utils.get_model_dir() == str(pathlib.Path(__file__).parent))
"""


@pytest.mark.parametrize(("mode", "is_found"), [("", False), (PROCESS, True)], ids=["thread", "process"])
async def test_pickles_of_a_models_own_classes(tmp_path: Path, mode: str, is_found: bool) -> None:
    """As models of scikit-learn and torch have them."""
    directory = write_model(tmp_path, "m", ECHO_CONFIG + mode, PICKLE) / "1"
    (directory / "own_offset.py").write_text(OFFSET)
    (directory / "offset.pkl").write_bytes(b"cown_offset\nOffset\n)\x81.")
    async with serving(tmp_path) as core, asyncio.timeout(60):
        if is_found:
            assert values(await single(core, request("m", floats(3)))) == [5]
        else:
            assert "the model's own module own_offset if the parameter EXECUTION_MODE is" in reason(core, "m")


async def test_a_request_for_which_there_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with too many open files sends large tensors within the message."""

    def fail(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    code = 'return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])'
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, echo_model(code))
    monkeypatch.setattr(os, "memfd_create", fail)
    large = floats(*range(100_000))
    async with serving(tmp_path) as core, asyncio.timeout(60):
        assert values(await single(core, request("m", large))) == large.data.tolist()


async def test_a_process_that_cannot_receive_does_not_keep_its_request(tmp_path: Path) -> None:
    code = """
        if x[0] == -1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x[:1])])"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, "import resource\n" + echo_model(code))
    large = floats(*range(100_000))
    async with serving(tmp_path) as core, asyncio.timeout(60):
        assert values(await single(core, request("m", floats(-1)))) == [-1]
        with pytest.raises(Unavailable, match="is being restarted"):
            await single(core, request("m", large))
        assert values(await single(core, request("m", large))) == [0]


async def test_a_model_ends_the_processes_that_it_forks(tmp_path: Path) -> None:
    """As `multiprocessing.Pool` does: with SIGTERM, which the model's own process leaves to the server."""
    body = """forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        forked.terminate()
        forked.join()
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 0 + forked.exitcode)])"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, "import multiprocessing, time\n" + echo_model(body))
    async with serving(tmp_path) as core, asyncio.timeout(60):
        assert values(await single(core, request("m", floats(1)))) == [-signal.SIGTERM]


async def test_a_decoupled_model_and_its_cancellation(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "count", ECHO_CONFIG + DECOUPLED + PROCESS, COUNT)
    async with serving(tmp_path) as core:
        responses = await collect(core, request("count", floats(3)))
        assert [values(response) for response in responses[:-1]] == [[0], [1], [2]]
        async with aclosing(core.infer_stream(request("count", floats(100_000)))) as stream:
            async for _ in stream:
                break
        assert await appears(directory / "1/cancelled")


async def test_models_in_processes_call_other_models(tmp_path: Path) -> None:
    code = """
import asyncio
class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]
    async def answer(self, request):
        ask = lambda name: pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], name)
        one, other = await asyncio.gather(ask("inner").async_exec(), ask("inner").async_exec())
        total = one.output_tensors()[0].as_numpy() + other.output_tensors()[0].as_numpy()
        async for response in await ask("count").async_exec(decoupled=True):
            for tensor in response.output_tensors():
                total += tensor.as_numpy()
        for response in ask("count").exec(decoupled=True):
            for tensor in response.output_tensors():
                total += tensor.as_numpy()
        assert ask("nobody").exec().error().code() == pb_utils.TritonError.NOT_FOUND
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", total)])
"""
    write_model(tmp_path, "outer", ECHO_CONFIG + PROCESS, code)
    write_model(tmp_path, "caller", ECHO_CONFIG + PROCESS, CALLER)
    write_model(tmp_path, "inner", ECHO_CONFIG + PROCESS, INNER)
    write_model(tmp_path, "count", ECHO_CONFIG + DECOUPLED + PROCESS, COUNT)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(3)))) == [4 + 4 + 3 + 3]
        answers = await asyncio.gather(*(single(core, request("caller", floats(i))) for i in range(20)))
        assert [values(answer) for answer in answers] == [[(i + 1) * 10] for i in range(20)]


async def test_leaving_the_iterator_cancels_the_called_model(tmp_path: Path) -> None:
    code = echo_model(
        """
        for response in pb_utils.InferenceRequest("", 0, request.inputs(), ["Y"], "inner").exec(decoupled=True):
            return pb_utils.InferenceResponse(response.output_tensors())"""
    )
    write_model(tmp_path, "outer", ECHO_CONFIG + PROCESS, code)
    inner = write_model(tmp_path, "inner", ECHO_CONFIG + DECOUPLED + PROCESS, COUNT)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("outer", floats(5000)))) == [0]
        assert await appears(inner / "1/cancelled")


@pytest.mark.parametrize(
    ("order", "how"),
    [(-1, "was ended by SIGSEGV"), (-2, "ended with exit code 3"), (-3, "was ended by SIGKILL")],
    ids=["segfault", "exit", "kill"],
)
async def test_a_process_that_dies_takes_only_its_own_requests(tmp_path: Path, order: int, how: str) -> None:
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, RECKLESS)
    async with serving(tmp_path) as core:
        (died, waited) = await asyncio.gather(
            collect(core, request("m", floats(order))), collect(core, request("m", floats(7)))
        )
        assert isinstance(died[0].error, Unavailable)
        assert f"model instance 'm_0': its process {how}" in str(died[0].error)
        assert values(waited[0]) == [7]
        assert core.model_ready("m")
        assert core.ready()
        first, second = pids(directory)
        assert first != second
        assert not runs(first)


async def test_processes_that_a_model_has_forked_go_with_it(tmp_path: Path) -> None:
    """They hold its end of the channel open."""
    fork = """
        if os.fork() == 0:
            with open(pathlib.Path(__file__).with_name("forked"), "a") as file:
                print(os.getpid(), file=file)
            time.sleep(60)
            os._exit(0)
"""
    code = RECKLESS.replace("    def execute", fork.strip("\n") + "\n    def execute")
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, code)
    async with serving(tmp_path) as core, asyncio.timeout(20):
        assert await appears(directory / "1/forked")
        died = await collect(core, request("m", floats(-2)))
        assert "ended with exit code 3" in str(died[0].error)
        assert values(await single(core, request("m", floats(7)))) == [7]
        await until(lambda: len((directory / "1/forked").read_text().split()) == 2)
    forked = [int(line) for line in (directory / "1/forked").read_text().split()]
    await until(lambda: not any(map(runs, forked)))


async def test_readiness_tells_the_truth_while_a_process_is_started_again(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, RECKLESS)
    async with serving(tmp_path) as core:
        os.kill(pids(directory)[0], 9)
        await until(lambda: not core.model_ready("m"))
        assert not core.ready()
        assert values(await single(core, request("m", floats(1)))) == [1]  # it waits
        assert core.ready()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("raise RuntimeError('gone bad')", "gone bad"),
        ("import os; os._exit(5)", "its process ended with exit code 5 while the model was loaded"),
    ],
    ids=["raises", "dies"],
)
async def test_a_model_that_cannot_be_opened_again_is_not_ready_and_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str, problem: str
) -> None:
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, RECKLESS)
    good = (directory / "1/model.py").read_text()
    async with serving(tmp_path) as core:
        (directory / "1/model.py").write_text(bad)
        died = collect(core, request("m", floats(-2)))
        waited = collect(core, request("m", floats(1)))
        for (answer,) in await asyncio.gather(died, waited):
            assert isinstance(answer.error, Unavailable)
        attempts = caplog.text.count("could not be started again")
        while caplog.text.count("could not be started again") < attempts + 2:
            with pytest.raises(Unavailable, match=problem):
                await single(core, request("m", floats(1)))
            await asyncio.sleep(0.01)
        assert not core.model_ready("m")
        (directory / "1/model.py").write_text(good)
        await until(lambda: core.model_ready("m"))
        assert values(await single(core, request("m", floats(1)))) == [1]


async def test_instances_die_alone(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS + "instance_group { count: 2 }", RECKLESS)
    async with serving(tmp_path) as core:
        orders = [-2 if i % 10 == 0 else i for i in range(1, 31)]
        answers = await asyncio.gather(*(collect(core, request("m", floats(order))) for order in orders))
        for order, (answer,) in zip(orders, answers, strict=True):
            assert (answer.error is not None) == (order == -2)
        await until(lambda: len(pids(directory)) == 2 + orders.count(-2) and core.ready())


async def test_a_batch_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    limit = parameter("EXECUTION_TIMEOUT_SECS", "1.5")
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS + limit, RECKLESS)
    async with serving(tmp_path) as core:
        hung, waited = await asyncio.gather(
            collect(core, request("m", floats(-4))), collect(core, request("m", floats(7)))
        )
        assert "was ended: a batch took longer than 1.5 s" in str(hung[0].error)
        assert values(waited[0]) == [7]


async def test_a_batch_that_nobody_waits_for_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_parameters, "ABANDONED_TIMEOUT_S", 0.2)
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, RECKLESS)
    async with serving(tmp_path) as core:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(single(core, request("m", floats(-4))), 0.2)
        async with asyncio.timeout(60):
            assert values(await single(core, request("m", floats(7)))) == [7]


async def test_the_limit_of_a_batch_spares_the_process_after_its_own(tmp_path: Path) -> None:
    """It dies at once, and its successor takes longer to start than the batch might have run."""
    limit = parameter("EXECUTION_TIMEOUT_SECS", "1")
    slow = RECKLESS.replace("def initialize(self, args):", "def initialize(self, args):\n        time.sleep(1.3)")
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS + limit, slow)
    async with serving(tmp_path) as core:
        died = await collect(core, request("m", floats(-2)))
        assert "ended with exit code 3" in str(died[0].error)
        assert values(await single(core, request("m", floats(7)))) == [7]
        assert len(pids(directory)) == 2


async def test_what_cannot_be_sent_is_the_answer_of_its_request(tmp_path: Path) -> None:
    body = """
        class Own:
            pass
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)], parameters={"own": Own()})"""
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, echo_model(body))
    async with serving(tmp_path) as core:
        with pytest.raises(InternalError, match="values of type bool, int, float or str, got 'own': Own"):
            await single(core, request("m", floats(7)))
        assert core.ready()


async def test_unloading_ends_the_process_even_if_the_model_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmserve.backends.python.instance.FINALIZE_TIMEOUT_S", 0.3)
    directory = write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, RECKLESS)
    finalize = "    def finalize(self): pathlib.Path(__file__).with_name('finalized').touch()\n"
    polite = write_model(tmp_path, "polite", ECHO_CONFIG + PROCESS, RECKLESS + finalize)
    async with serving(tmp_path, drain_s=0.1) as core:
        hanging = asyncio.ensure_future(collect(core, request("m", floats(-4))))
        await asyncio.sleep(0.1)
    (answer,) = await hanging
    assert answer.error is not None
    assert not runs(pids(directory)[0])
    assert not runs(pids(polite)[0])
    assert (polite / "1/finalized").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; os._exit(5)\n", "its process ended with exit code 5 while the model was loaded"),
        ("import ctypes; ctypes.string_at(0)\n", "was ended by SIGSEGV while the model was loaded"),
        ("import surely_not_installed\n", "No module named 'surely_not_installed'"),
        ("class E(Exception): pass\nraise E('own kind')\n", "E: own kind"),
        (
            "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n"
            "        import os; os._exit(6)\n    def execute(self, requests): pass\n",
            "auto_complete_config: its process ended with exit code 6",
        ),
    ],
)
async def test_models_that_fail_to_load(tmp_path: Path, code: str, expected: str) -> None:
    write_model(tmp_path, "bad", ECHO_CONFIG + PROCESS, code)
    async with serving(tmp_path) as core:
        assert expected in reason(core, "bad")


async def test_auto_complete_runs_in_a_process_too(tmp_path: Path) -> None:
    code = INNER + (
        "    @staticmethod\n"
        "    def auto_complete_config(config):\n"
        "        for kind, name in ((config.add_input, 'X'), (config.add_output, 'Y')):\n"
        "            kind({'name': name, 'data_type': 'TYPE_FP32', 'dims': [-1]})\n"
        "        return config\n"
    )
    write_model(tmp_path, "m", 'backend: "python"\n' + PROCESS, code)
    async with serving(tmp_path) as core:
        assert values(await single(core, request("m", floats(1)))) == [2]


async def test_log_lines_reach_the_servers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = "pb_utils.Logger.log_warn('seen'); return pb_utils.InferenceResponse([pb_utils.Tensor('Y', x)])"
    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS, echo_model(body))
    async with serving(tmp_path) as core:
        await single(core, request("m", floats(1)))
    assert ("llmserve.model.m_0", logging.WARNING, "seen") in caplog.record_tuples


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (parameter("EXECUTION_MODE", "cloud"), "EXECUTION_MODE must be one of thread, process, got 'cloud'"),
        (parameter("EXECUTION_TIMEOUT_SECS", "3"), "EXECUTION_TIMEOUT_SECS requires EXECUTION_MODE process"),
        (PROCESS + parameter("EXECUTION_TIMEOUT_SECS", "soon"), "must be a number above 0, got 'soon'"),
    ],
)
async def test_wrong_parameters_are_load_errors(tmp_path: Path, extra: str, expected: str) -> None:
    write_model(tmp_path, "m", ECHO_CONFIG + extra, INNER)
    async with serving(tmp_path) as core:
        assert expected in reason(core, "m")


async def test_a_process_without_a_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "EXIT_TIMEOUT_S", 60)  # then it would be killed
    process = launch.ModelProcess()
    assert runs(process.pid)
    assert "exit code 1" in await asyncio.to_thread(process.wait)  # which closes the channel first


async def test_many_requests_at_once(tmp_path: Path) -> None:
    def check(core: InferenceCore, answers: list[object]) -> None:
        assert core.ready()
        assert len(answers) == 300

    write_model(tmp_path, "m", ECHO_CONFIG + PROCESS + "instance_group { count: 2 }", INNER)
    async with serving(tmp_path) as core:
        asked = (single(core, request("m", floats(*([i] * (1 + 211 * (i % 100)))))) for i in range(300))
        answers = await asyncio.gather(*asked)
        for i, answer in enumerate(answers):
            assert set(values(answer)) == {i + 1}
        check(core, list(answers))
