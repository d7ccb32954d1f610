"""Loading and unloading while requests run: the explicit API, hot reload, polling, what the index and readiness say."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.backends.identity import IdentityBackend
from llmserve.errors import InternalError, InvalidArgument, LlmserveError, ModelConfigError, NotFound, Unavailable
from llmserve.serving.backend import LoadContext, LoadedModel
from llmserve.serving.core import InferenceCore, ServerSettings
from llmserve.serving.settings import ALL_MODELS, ControlMode
from tests.serving.instances import Instance
from tests.serving.models import BACKENDS, floats, identity_config, request, single, values, write_model

TIMES = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy() * FACTOR)]) for r in requests]
"""
HEAD = "import triton_python_backend_utils as pb_utils\n"
PYTHON = identity_config().replace("identity", "python")
SLOW = identity_config('parameters { key: "execute_delay_ms" value { string_value: "80" } }')


def times(factor: int) -> str:
    return TIMES.replace("FACTOR", str(factor))


def ensemble_config(*steps: str) -> str:
    """X goes through the steps, one after the other, to Y."""
    names = ["X", *(f"t{index}" for index in range(1, len(steps))), "Y"]
    written = [
        f'step {{ model_name: "{step}" model_version: -1 input_map {{ key: "X" value: "{names[index]}" }} '
        f'output_map {{ key: "Y" value: "{names[index + 1]}" }} }}'
        for index, step in enumerate(steps)
    ]
    text = identity_config("ensemble_scheduling { " + " ".join(written) + " }")
    return text.replace('backend: "identity"', 'platform: "ensemble"')


def as_json(text: str) -> str:
    return str(json_format.MessageToJson(text_format.Parse(text, ModelConfig())))


@asynccontextmanager
async def explicit(
    *repositories: Path | str, load: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[InferenceCore]:
    made = ServerSettings(repositories, control_mode=ControlMode.EXPLICIT, load_at_start=load, **settings)
    async with started(made) as core:
        yield core


@asynccontextmanager
async def started(settings: ServerSettings) -> AsyncIterator[InferenceCore]:
    core = InferenceCore(settings, BACKENDS)
    await core.start()
    try:
        yield core
    finally:
        await core.stop(1)


async def answer(core: InferenceCore, model: str = "m") -> Any:
    return values(await single(core, request(model, floats(1))))[0]


def states(core: InferenceCore) -> Mapping[str, tuple[str, str]]:
    return {f"{row.name}:{row.version}".rstrip(":"): (row.state, row.reason) for row in core.repository_index()}


async def eventually(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    for _ in range(2000):
        met = condition()
        if met is True or (isinstance(met, Awaitable) and await met):
            return
        await asyncio.sleep(0.005)
    pytest.fail("the condition did not become true")


async def reaches(core: InferenceCore, row: str, state: tuple[str, str]) -> None:
    await eventually(lambda: states(core).get(row) == state)


async def answers(core: InferenceCore, expected: float, model: str = "m") -> None:
    async def does() -> bool:
        return bool(await answer(core, model) == expected)

    await eventually(does)


async def test_explicit_mode_loads_what_is_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, "a", identity_config())
    write_model(tmp_path, "b", identity_config())
    async with explicit(tmp_path, load=("b",)) as core:
        assert states(core) == {"a": ("", ""), "b:1": ("READY", "")}
        assert core.ready()  # a model that nobody asks for does not count
        with pytest.raises(NotFound, match="Request for unknown model: 'a' is not found"):
            await answer(core, "a")
        await core.load_model("a")
        assert await answer(core, "a") == 1
        write_model(tmp_path, "late", identity_config())
        assert states(core)["late"] == ("", "")
        await core.load_model("late")
        assert [row.name for row in core.repository_index(ready=True)] == ["a", "b", "late"]
    async with explicit(tmp_path, load=(ALL_MODELS,)) as core:
        assert len(core.repository_index(ready=True)) == 3


async def test_models_to_start_with_must_exist(tmp_path: Path) -> None:
    write_model(tmp_path, "a", identity_config())
    with pytest.raises(ModelConfigError, match=r"(?s)model 'b' does not exist.*model 'c' does not exist"):
        async with explicit(tmp_path, load=("a", "b", "c")):
            pass


async def test_explicit_mode_may_begin_with_nothing(tmp_path: Path) -> None:
    async with explicit(tmp_path) as core:
        assert core.ready()
        assert core.repository_index() == []


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_other_modes_refuse_clients(tmp_path: Path, mode: ControlMode) -> None:
    write_model(tmp_path, "m", identity_config())
    async with started(ServerSettings((tmp_path,), control_mode=mode)) as core:
        words = "explicit model load / unload is not allowed if polling is enabled"
        with pytest.raises(Unavailable, match=words):
            await core.load_model("m")
        with pytest.raises(Unavailable, match=words):
            await core.unload_model("m")


async def test_unload_lets_requests_end(tmp_path: Path) -> None:
    write_model(tmp_path, "m", SLOW)
    async with explicit(tmp_path, load=("m",)) as core:
        running = asyncio.create_task(answer(core))
        await asyncio.sleep(0.01)
        await core.unload_model("m")
        assert states(core) == {"m:1": ("UNLOADING", "")}
        assert not core.model_ready("m")
        with pytest.raises(NotFound, match="'m' has no available versions"):
            await answer(core)
        assert await running == 1
        await reaches(core, "m:1", ("UNAVAILABLE", "unloaded"))
        assert core.ready()
        await core.unload_model("m")
        await core.unload_model("never heard of")
        await core.load_model("m")
        assert await answer(core) == 1


async def test_reload_takes_new_files_and_leaves_old_ones_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON, times(2))
    async with explicit(tmp_path, load=("m",)) as core:
        served = core.model_config("m")
        await core.load_model("m")
        assert core.model_config("m") is served  # nothing has changed, nothing is done
        write_model(tmp_path, "m", PYTHON, times(30))
        await core.load_model("m")
        assert await answer(core) == 30


async def test_a_failed_reload_leaves_the_old_version_serving(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON, times(2))
    async with explicit(tmp_path, load=("m",)) as core:
        write_model(tmp_path, "m", PYTHON, "raise RuntimeError('no')\n")
        with pytest.raises(InvalidArgument, match=r"(?s)load failed for model 'm': version 1 is at UNAVAILABLE.*no"):
            await core.load_model("m")
        assert await answer(core) == 2
        state, reason = states(core)["m:1"]
        assert (state, "the last reload failed" in reason) == ("READY", True)
        assert core.ready()
        write_model(tmp_path, "m", PYTHON, times(3))
        await core.load_model("m")
        assert states(core) == {"m:1": ("READY", "")}
        assert await answer(core) == 3


async def test_a_model_that_does_not_load_keeps_the_server_unready_until_it_does(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON, "raise RuntimeError('no')\n")
    async with explicit(tmp_path) as core:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="load failed for model 'm'"):
                await core.load_model("m")
        assert not core.ready()
        write_model(tmp_path, "m", PYTHON, times(3))
        await core.load_model("m")
        assert core.ready()
        write_model(tmp_path, "m", PYTHON, "raise RuntimeError('no')\n")
        await core.unload_model("m")
        with pytest.raises(InvalidArgument):
            await core.load_model("m")
        assert not core.ready()
        await core.unload_model("m")
        assert core.ready()


@pytest.mark.parametrize(
    ("name", "config", "files", "error", "words"),
    [
        ("nope", "", {}, InternalError, "failed to load 'nope', failed to poll from model repository"),
        ("typo", "", {}, InternalError, "failed to load 'typo', failed to poll from model repository.*line 4"),
        (
            "empty",
            "",
            {},
            InvalidArgument,
            "at least one version must be available .* 'empty': no version: create a dir",
        ),
        ("m", "{", {}, InternalError, "failed to poll from model repository: .*config override is not valid"),
        ("m", '{"max_batchsize": 4}', {}, InternalError, "max_batchsize"),
        ("m", '{"name": "other"}', {}, InternalError, "says name: 'other'"),
        ("m", "", {"1/model.py": b""}, InvalidArgument, "override files also require the model's config"),
        ("m", "{}", {"../../evil": b""}, InvalidArgument, "not a path inside the model directory"),
        ("m", "{}", {"/tmp/evil": b""}, InvalidArgument, "not a path inside the model directory"),
        ("m", "{}", {"": b""}, InvalidArgument, "not a path inside the model directory"),
        ("m", "{}", {"1/../../x": b""}, InvalidArgument, "not a path inside the model directory"),
        ("m", "{}", {"1/a\0b": b""}, InvalidArgument, "not a path inside the model directory"),
        ("m", "{}", {"1": b"", "1/model.py": b""}, InvalidArgument, "cannot be written"),
        ("m", "{}", {"x" * 300: b""}, InvalidArgument, "cannot be written: File name too long"),
        ("../m", "{}", {"1/x": b""}, InvalidArgument, "'../m' is not the name of a model"),
        ("/m", "{}", {"1/x": b""}, InvalidArgument, "'/m' is not the name of a model"),
        ("a/b", "{}", {"1/x": b""}, InvalidArgument, "'a/b' is not the name of a model"),
        ("", "{}", {"1/x": b""}, InvalidArgument, "'' is not the name of a model"),
        ("m\0", "{}", {"1/x": b""}, InvalidArgument, "is not the name of a model"),
        ("../m", "", {}, InternalError, "failed to load '../m', failed to poll from model repository"),
        ("m", '{"backend": "unheard"}', {}, InvalidArgument, "load failed for model 'm': .*unknown backend 'unheard'"),
        (
            "m",
            as_json(identity_config("version_policy { specific { versions: 7 } }")),
            {},
            InvalidArgument,
            "at least one version must be available under the version policy of model 'm'",
        ),
    ],
)
async def test_loads_that_are_refused_change_nothing(
    tmp_path: Path, name: str, config: str, files: dict[str, bytes], error: type[LlmserveError], words: str
) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "typo", identity_config("max_batchsize: 3"))
    write_model(tmp_path, "empty", identity_config())
    shutil.rmtree(tmp_path / "empty/1")
    async with explicit(tmp_path, load=("m",)) as core:
        with pytest.raises(error, match=f"(?s){words}"):
            await core.load_model(name, config, files)
        assert await answer(core) == 1
        assert core.ready()


async def test_config_override_holds_until_the_model_is_unloaded(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    async with explicit(tmp_path, load=("m",)) as core:
        await core.load_model("m", as_json(identity_config("max_batch_size: 5")))
        assert core.model_config("m").max_batch_size == 5
        await core.load_model("m")  # as Triton: the files have not changed
        assert core.model_config("m").max_batch_size == 5
        await core.unload_model("m")
        await core.load_model("m")
        assert core.model_config("m").max_batch_size == 0


async def test_file_override_replaces_the_directory(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON, times(2))
    async with explicit(tmp_path, load=("m",)) as core:
        files = {"7/model.py": (HEAD + times(70)).encode(), "7/data/x.bin": b"\0\1"}
        for name in ("m", "new"):
            await core.load_model(name, as_json(PYTHON), files)
            assert await answer(core, name) == 70
            assert list(core.model_metadata(name).versions) == ["7"]
        await core.load_model("m")
        assert await answer(core) == 2


BROKEN = (
    HEAD + "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('boom')\n"
).encode()
REJECTED: dict[str, tuple[str, Mapping[str, bytes]]] = {
    "no version": (as_json(PYTHON), {"model.py": times(2).encode()}),
    "no config": ("", {"1/model.py": times(2).encode()}),
    "config that is none": ("{", {"1/model.py": times(2).encode()}),
    "wrong config": (as_json(PYTHON.replace("FP32", "INVALID")), {"1/model.py": times(2).encode()}),
    "unknown backend": (as_json(PYTHON.replace("python", "cobol")), {"1/model.py": b""}),
    "code that is none": (as_json(PYTHON), {"1/model.py": b"("}),
    "code that fails": (as_json(PYTHON), {"1/model.py": BROKEN, "1/data/x.bin": bytes(10_000)}),
    "file outside": (as_json(PYTHON), {"1/model.py": BROKEN, "../x": b""}),
    "file in a file": (as_json(PYTHON), {"1": b"", "1/model.py": BROKEN}),
    "ensemble of nothing": (as_json(ensemble_config("nothing")), {"1/x": b""}),
    "ensemble of itself": (as_json(ensemble_config("new")), {"1/x": b""}),
}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where everything temporary goes."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def files_in(directory: Path) -> list[Path]:
    """Files, and directories of loads. What is being removed meanwhile is no error, as it is to `Path.rglob`."""
    found = [Path(folder, name) for folder, folders, files in os.walk(directory) for name in (*folders, *files)]
    return [path for path in found if path.is_file() or path.parent.name.startswith("llmserve-models-")]


@pytest.mark.parametrize("what", REJECTED)
async def test_a_rejected_load_of_a_new_model_leaves_nothing(tmp_path: Path, temporary: Path, what: str) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "m", PYTHON, times(2))
    config, files = REJECTED[what]
    async with explicit(repository, load=("m",)) as core:
        before, metrics = core.repository_index(), core.metrics_text()
        for _ in range(2):
            with pytest.raises((InvalidArgument, InternalError)):
                await core.load_model("new", config, files)
        assert core.repository_index() == before
        assert core.metrics_text() == metrics
        assert core.ready()
        assert files_in(temporary) == []
        with pytest.raises(NotFound, match="is not found"):
            await answer(core, "new")
        assert await answer(core) == 2
        assert not core._lifecycle._deployment._entries.get("new")
    assert files_in(temporary) == []


@pytest.mark.parametrize("what", ["code that fails", "ensemble of nothing"])
async def test_a_rejected_load_of_a_known_model_keeps_what_was(tmp_path: Path, temporary: Path, what: str) -> None:
    repository = tmp_path / "repository"
    write_model(repository, "m", PYTHON, times(2))
    config, files = REJECTED[what]
    async with explicit(repository) as core:
        with pytest.raises(InvalidArgument):
            await core.load_model("m", config, files)
        assert not core.ready()  # somebody has asked for a model of the repository, and it does not answer
        assert files_in(temporary) == []
        await core.load_model("m")
        with pytest.raises(InvalidArgument):
            await core.load_model("m", config, files)
        assert core.ready()
        assert files_in(temporary) == []
        assert await answer(core) == 2


async def test_many_rejected_loads_at_once_leave_nothing(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "repository").mkdir()
    good = (as_json(PYTHON), {"1/model.py": (HEAD + times(3)).encode()})
    async with explicit(tmp_path / "repository") as core:
        loads = [core.load_model(f"new{number % 7}", *REJECTED["code that fails"]) for number in range(60)]
        outcomes = await asyncio.gather(*loads, core.load_model("good", *good), return_exceptions=True)
        assert sum(isinstance(outcome, InvalidArgument) for outcome in outcomes) == 60
        assert [row.name for row in core.repository_index()] == ["good"]
        assert core.ready()
        assert len(files_in(temporary)) == 2  # a directory, and the file in it


async def test_a_model_that_only_a_client_has_sent_is_gone_when_it_is_unloaded(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "repository").mkdir()
    async with explicit(tmp_path / "repository") as core:
        for _ in range(3):
            await core.load_model("new", as_json(PYTHON), {"1/model.py": (HEAD + times(3)).encode()})
            assert await answer(core, "new") == 3
            await core.unload_model("new")
            await eventually(lambda: core.repository_index() == [])
            await eventually(lambda: files_in(temporary) == [])
        assert core.ready()


async def test_an_ensemble_brings_its_steps_and_takes_them_away(tmp_path: Path) -> None:
    write_model(tmp_path, "two", PYTHON, times(2))
    write_model(tmp_path, "five", PYTHON, times(5))
    write_model(tmp_path, "inner", ensemble_config("two", "five"))
    write_model(tmp_path, "outer", ensemble_config("inner", "two"))
    async with explicit(tmp_path) as core:
        await core.load_model("outer")
        assert await answer(core, "outer") == 20
        await core.load_model("five")  # now it has been asked for by name
        await core.unload_model("outer", unload_dependents=True)
        await eventually(lambda: [row.name for row in core.repository_index(ready=True)] == ["five"])
        await core.load_model("outer")
        await core.unload_model("outer")
        assert {row.name for row in core.repository_index(ready=True)} == {"five", "inner", "two"}
        await core.unload_model("inner", unload_dependents=True)
        assert {row.name for row in core.repository_index(ready=True)} == {"five", "two"}  # as if asked for by name


async def test_an_unloaded_step_takes_the_ensemble_along_and_brings_it_back(tmp_path: Path) -> None:
    write_model(tmp_path, "slow", SLOW)
    write_model(tmp_path, "ens", ensemble_config("slow", "slow"))
    async with explicit(tmp_path, load=("ens", "slow")) as core:
        running = asyncio.create_task(answer(core, "ens"))
        await asyncio.sleep(0.1)  # in its second step
        await core.unload_model("slow")
        assert states(core)["slow:1"] == ("UNLOADING", "")
        assert states(core)["ens:1"][0] == "UNLOADING"
        with pytest.raises(NotFound, match="'ens' has no available versions"):
            await answer(core, "ens")
        assert await running == 1
        await reaches(core, "slow:1", ("UNAVAILABLE", "unloaded"))
        assert states(core)["ens:1"] == ("UNAVAILABLE", "unloaded")
        assert core.ready()
        await core.load_model("slow")
        assert await answer(core, "ens") == 1


async def test_a_reloaded_step_is_used_by_the_ensemble(tmp_path: Path) -> None:
    write_model(tmp_path, "two", PYTHON, times(2))
    write_model(tmp_path, "ens", ensemble_config("two", "two"))
    async with explicit(tmp_path, load=("ens",)) as core:
        assert await answer(core, "ens") == 4
        write_model(tmp_path, "two", PYTHON, times(3))
        await core.load_model("ens")  # looks at the steps, too
        assert await answer(core, "ens") == 9
        assert core.statistics("ens")[0].inference_count == 2
        write_model(tmp_path, "two", PYTHON.replace('name: "Y"', 'name: "Z"'), times(3))
        with pytest.raises(InvalidArgument, match="load failed for model 'ens'"):
            await core.load_model("ens")
        assert not core.ready()
        write_model(tmp_path, "two", PYTHON, times(3))
        await core.load_model("two")
        assert await answer(core, "ens") == 9


async def test_an_ensemble_keeps_its_steps_until_it_is_planned_anew(tmp_path: Path) -> None:
    """While something else of the same load takes its time."""
    write_model(tmp_path, "two", PYTHON, times(2))
    write_model(tmp_path, "late", PYTHON, times(1))
    write_model(tmp_path, "ens", ensemble_config("two"))
    write_model(tmp_path, "both", ensemble_config("two", "late"))
    async with explicit(tmp_path, load=("ens", "both")) as core:
        write_model(tmp_path, "two", PYTHON, times(3))
        slow = "    def initialize(self, args):\n        import time\n        time.sleep(0.3)\n"
        write_model(tmp_path, "late", PYTHON, times(10) + slow)
        loading = asyncio.create_task(core.load_model("both"))
        await answers(core, 3, "two")
        assert not loading.done()
        assert [await answer(core, model) for model in ("ens", "both")] == [2, 2]
        await loading
        assert [await answer(core, model) for model in ("ens", "both")] == [3, 30]


async def test_a_changed_ensemble_that_is_wrong_leaves_the_old_one(tmp_path: Path) -> None:
    write_model(tmp_path, "two", PYTHON, times(2))
    write_model(tmp_path, "ens", ensemble_config("two"))
    async with explicit(tmp_path, load=("ens",)) as core:
        for wrong in (ensemble_config("two", "nope"), ensemble_config("two", "ens")):
            write_model(tmp_path, "ens", wrong)
            with pytest.raises(InvalidArgument, match=r"(?s)load failed for model 'ens'.*(nope|contains itself)"):
                await core.load_model("ens")
            assert await answer(core, "ens") == 2
        write_model(tmp_path, "two", PYTHON, times(3))
        await core.load_model("two")
        assert await answer(core, "ens") == 3  # the old plan, on the new step


async def test_no_request_is_lost_in_reloads(tmp_path: Path) -> None:
    """Every answer comes from one version as a whole, and versions only ever get newer."""
    num_reloads = 150
    write_model(tmp_path, "m", PYTHON, times(1))
    write_model(tmp_path, "ens", ensemble_config("m", "m"))
    async with explicit(tmp_path, load=("m", "ens")) as core:
        done = asyncio.Event()
        counts = {"m": 0, "ens": 0}

        async def ask(model: str) -> None:
            newest = 0
            while not done.is_set():
                value = int(await answer(core, model))
                factor = value if model == "m" else int(value**0.5)
                assert model == "m" or factor**2 == value, "a request was answered by two versions of a step"
                assert factor >= newest
                newest = factor
                counts[model] += 1

        clients = [asyncio.create_task(ask(model)) for model in ("m", "m", "ens", "ens")]
        for factor in range(2, num_reloads + 2):
            write_model(tmp_path, "m", PYTHON, times(factor))
            await core.load_model("m")
            assert await answer(core) == factor
        done.set()
        await asyncio.gather(*clients)
        assert min(counts.values()) > num_reloads
        assert core.ready()


async def test_reloaded_files_are_read_again_and_nothing_is_written_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytecode would be taken for a file's: of the same size, changed in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    code = HEAD + "from helper import FACTOR\n" + TIMES
    directory = write_model(tmp_path, "m", PYTHON, code)
    second = int(directory.stat().st_mtime)
    async with explicit(tmp_path) as core:
        for factor in (2, 3):
            (directory / "1/helper.py").write_text(f"FACTOR = {factor}\n")
            os.utime(directory / "1/helper.py", (second, second + factor / 10))
            await core.load_model("m")
            assert await answer(core) == factor
    assert sorted(os.listdir(directory / "1")) == ["helper.py", "model.py"]


class Mortal(IdentityBackend):
    """Its instances work until the test says otherwise."""

    name = "mortal"

    def __init__(self) -> None:
        self.instances: list[Instance] = []

    def load(self, context: LoadContext) -> LoadedModel:
        self.instances.append(Instance())
        return LoadedModel([self.instances[-1]])


async def test_a_model_that_has_died_is_loaded_again_when_a_client_asks(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config().replace("identity", "mortal"))
    write_model(tmp_path, "ens", ensemble_config("m"))
    backend = Mortal()
    core = InferenceCore(
        ServerSettings((tmp_path,), control_mode=ControlMode.EXPLICIT, load_at_start=("ens",)), {"mortal": backend}
    )
    await core.start()
    for name in ("m", "ens"):
        await core.load_model(name)
        assert len(backend.instances) == 1  # its files have not changed
    for num_loaded, name in ((2, "m"), (3, "ens")):
        backend.instances[-1].works = False
        assert not core.ready()
        await core._lifecycle.poll()
        assert len(backend.instances) == num_loaded - 1  # nobody has asked
        await core.load_model(name)
        assert len(backend.instances) == num_loaded
        assert core.ready()
    await core.stop(1)


async def test_a_cancelled_load_is_finished(tmp_path: Path) -> None:
    """What a client that goes away has begun is not half done."""
    write_model(tmp_path, "m", PYTHON, "import time\ntime.sleep(0.2)\n" + times(4))
    async with explicit(tmp_path) as core:
        loading = asyncio.create_task(core.load_model("m"))
        await reaches(core, "m:1", ("LOADING", ""))
        assert not core.ready()
        loading.cancel()
        await reaches(core, "m:1", ("READY", ""))
        assert await answer(core) == 4


@asynccontextmanager
async def polling(*repositories: Path, poll_s: float = 0.02) -> AsyncIterator[InferenceCore]:
    settings = ServerSettings(repositories, control_mode=ControlMode.POLL, poll_s=poll_s)
    async with started(settings) as core:
        yield core


async def test_polling_follows_the_repository(tmp_path: Path) -> None:
    write_model(tmp_path, "m", PYTHON, times(2))
    async with polling(tmp_path) as core:
        write_model(tmp_path, "n", identity_config())
        await reaches(core, "n:1", ("READY", ""))
        write_model(tmp_path, "m", PYTHON, times(30), version=2)
        await reaches(core, "m:2", ("READY", ""))
        await reaches(core, "m:1", ("UNAVAILABLE", "unloaded"))
        assert await answer(core) == 30
        shutil.rmtree(tmp_path / "n")
        await eventually(lambda: "n:1" not in states(core))
        write_model(tmp_path, "m", PYTHON, times(4), version=2)
        await answers(core, 4)


async def test_polling_keeps_what_works(tmp_path: Path) -> None:
    """A broken config, and a repository that has disappeared."""
    repository = tmp_path / "repository"
    write_model(repository, "m", PYTHON, times(2))
    async with polling(repository) as core:
        write_model(repository, "m", "max_batchsize: 3")
        await eventually(lambda: states(core)["m:1"][1] != "")
        assert "line 1, column 1: ModelConfig has no field 'max_batchsize'" in states(core)["m:1"][1]
        assert await answer(core) == 2
        repository.rename(tmp_path / "away")
        await asyncio.sleep(0.1)
        assert await answer(core) == 2
        write_model(tmp_path / "away", "m", PYTHON, times(5))
        (tmp_path / "away").rename(repository)
        await answers(core, 5)


async def test_a_disappeared_repository_is_an_error_of_the_load(tmp_path: Path) -> None:
    write_model(tmp_path / "r", "m", PYTHON, times(2))
    async with explicit(tmp_path / "r", load=("m",)) as core:
        shutil.rmtree(tmp_path / "r")
        with pytest.raises(InternalError, match=r"failed to load 'm', failed to poll .*is not a directory"):
            await core.load_model("m")
        assert await answer(core) == 2
        assert [row.name for row in core.repository_index()] == ["m"]


async def test_a_directory_that_is_still_being_written(tmp_path: Path) -> None:
    """The first attempt finds half of it."""
    directory = write_model(tmp_path, "m", PYTHON, "import helper\n" + times(3))
    completing = (
        "import pathlib\n"
        f"pathlib.Path({str(directory / '1/model.py')!r}).write_text({HEAD + times(4)!r})\n"
        "raise ImportError('half a file')\n"
    )
    (directory / "1/helper.py").write_text(completing)
    async with explicit(tmp_path) as core:
        await core.load_model("m")
        assert await answer(core) == 4
        assert states(core) == {"m:1": ("READY", "")}


async def test_a_directory_that_never_comes_to_rest(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        f"file = pathlib.Path({str(tmp_path / 'm/1/notes')!r})\n"
        "file.write_text(str(time.monotonic_ns()))\n"
        "raise RuntimeError('never')\n"
    )
    write_model(tmp_path, "m", PYTHON, code)
    async with explicit(tmp_path) as core:
        with pytest.raises(InvalidArgument, match="never"):
            await core.load_model("m")


async def test_of_several_versions_all_are_loaded_or_none(tmp_path: Path) -> None:
    config = PYTHON + "version_policy { all { } }"
    write_model(tmp_path, "m", config, times(1))
    write_model(tmp_path, "m", config, "raise RuntimeError('no')\n", version=2)
    async with explicit(tmp_path) as core:
        with pytest.raises(InvalidArgument, match="version 2 is at UNAVAILABLE state"):
            await core.load_model("m")
        assert not core.model_ready("m")
        write_model(tmp_path, "m", config, times(2), version=2)
        await core.load_model("m")
        assert json.dumps(list(core.model_metadata("m").versions)) == '["1", "2"]'
