"""Opening and closing, what is refused, and the settings that come from outside."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from llmserve.core import SamplingParams
from llmserve.engine.cpu import runner
from llmserve.engine.cpu.runner import CpuRunner, read_header
from llmserve.engine.machine import cores as cpu_cores
from llmserve.engine.native import library
from llmserve.engine.native.library import Library, available_isas
from llmserve.engine.native.step import FlatStep, StepMemory
from llmserve.errors import InternalError, InvalidArgument, ResourceExhausted, Unsupported
from llmserve.scheduler.plan import Chunk, SampleRequest, StepPlan
from tests.engine.cpu.conftest import EngineFile, OpenRunner
from tests.engine.cpu.networks import LIMITS, all_logits, random_ids


@pytest.fixture
def path(engine_file: EngineFile) -> Path:
    return engine_file("rope", "float16", "")


def test_info_is_what_the_scheduler_plans_with(path: Path, open_runner: OpenRunner) -> None:
    info = open_runner(path, num_blocks=17).info
    assert (info.vocab_size, info.block_size, info.num_blocks) == (83, LIMITS.tokens_per_block, 17)
    assert (info.max_num_tokens, info.max_batch_size, info.max_seq_len) == (96, 8, 96)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_zero_threads_are_the_cores_of_this_process(
    path: Path, monkeypatch: pytest.MonkeyPatch, open_runner: OpenRunner
) -> None:
    for cores in (1, 3):
        monkeypatch.setattr(cpu_cores, "usable_cores", lambda cores=cores: cores)
        before = num_threads()
        opened = open_runner(path, threads=0)
        assert isinstance(opened, CpuRunner)
        assert opened.threads == cores
        assert num_threads() == before + cores - 1  # the caller is one of them


def test_close_twice_and_reopen(path: Path) -> None:
    for _ in range(3):
        opened = CpuRunner.open(path, num_blocks=20, threads=2)
        all_logits(opened, [1, 2, 3])
        opened.close()
        opened.close()
    with pytest.raises(AssertionError, match="closed"):
        all_logits(opened, [1])


def test_threads_end_with_their_runner(path: Path) -> None:
    before = num_threads()
    opened = CpuRunner.open(path, num_blocks=20, threads=4)
    assert num_threads() == before + 3
    del opened
    assert num_threads() == before


def run_script(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_process_may_exit_while_a_step_runs(path: Path) -> None:
    code = """
        import sys, threading, time
        from pathlib import Path
        from llmserve.engine.cpu.runner import CpuRunner
        from llmserve.scheduler.plan import Chunk, StepPlan

        runner = CpuRunner.open(Path(sys.argv[1]), num_blocks=24, threads=1, isa="portable")
        plan = StepPlan((Chunk(0, [1] * 96, 0, range(24)),))
        started = threading.Event()

        def steps():
            while True:
                runner.step(plan)
                started.set()

        threading.Thread(target=steps, daemon=True).start()
        started.wait()
        print("exits")
    """
    for _ in range(3):
        done = run_script(code, path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "exits\n", "")


def test_too_many_threads_are_an_error_that_leaves_none_behind(path: Path) -> None:
    code = """
        import os, resource, sys
        from pathlib import Path
        from llmserve.engine.machine import cores
        from llmserve.engine.cpu.runner import CpuRunner
        from llmserve.errors import InternalError

        cores.usable_cores = lambda: 100

        def num_threads():
            return len(os.listdir("/proc/self/task"))

        path = Path(sys.argv[1])
        CpuRunner.open(path, num_blocks=1, threads=1).close()
        before = num_threads()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))  # stacks take address space
        try:
            CpuRunner.open(path, num_blocks=1, threads=1000)
        except InternalError as error:
            print(error)
        print(num_threads() - before)
        runner = CpuRunner.open(path, num_blocks=1, threads=3)
        print(num_threads() - before)
        runner.close()
    """
    done = run_script(code, path)
    assert done.returncode == 0, done.stderr
    error, left, opened = done.stdout.splitlines()
    assert "cannot start threads" in error
    assert (left, opened) == ("0", "2")


def test_a_pool_larger_than_the_memory_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceExhausted, match="lower the number of KV blocks") as error:
        CpuRunner.open(path, num_blocks=2**28)
    assert str(2**28 * read_header(path).kv_bytes_per_block) in str(error.value)
    monkeypatch.setattr(runner, "available_memory_bytes", lambda: 1000)
    with pytest.raises(ResourceExhausted, match="1000 bytes are available"):
        CpuRunner.open(path, num_blocks=1)


def test_a_pool_beyond_the_address_space_is_an_error_of_the_library(path: Path) -> None:
    with pytest.raises(InvalidArgument, match="number of KV blocks must be 1 to"):
        library.load_library().open(path, isa="", num_blocks=2**31, threads=1)


@pytest.mark.parametrize(("blocks", "threads"), [(0, 1), (-1, 1), (1, -1)])
def test_settings_that_make_no_sense(blocks: int, threads: int, path: Path) -> None:
    with pytest.raises(InvalidArgument):
        CpuRunner.open(path, num_blocks=blocks, threads=threads)


def test_isas_start_with_the_portable_one() -> None:
    assert available_isas()[0] == "portable"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="about processors for x86-64")
def test_isas_are_those_that_the_system_says_the_processor_has() -> None:
    flags = set(re.findall(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    avx2 = {"avx", "avx2", "fma", "f16c"}
    needs = {"avx2": avx2, "avx2_vnni": {*avx2, "avx_vnni"}}
    needs["avx512"] = {*avx2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert available_isas() == ["portable", *(isa for isa, needed in needs.items() if needed <= flags)]


def test_environment_forces_an_isa(path: Path, monkeypatch: pytest.MonkeyPatch, open_runner: OpenRunner) -> None:
    assert open_runner(path).isa == available_isas()[-1]
    monkeypatch.setenv("LLMSERVE_ISA", "portable")
    assert open_runner(path).isa == "portable"
    assert open_runner(path, isa=available_isas()[-1]).isa == available_isas()[-1]
    monkeypatch.setenv("LLMSERVE_ISA", "neon9")
    with pytest.raises(Unsupported, match=r"no 'neon9' kernels; it has portable"):
        open_runner(path)


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="pip install"):
        Library(tmp_path / "libllmserve_cpu.so")


def test_a_library_for_another_processor_says_which(tmp_path: Path) -> None:
    """As in a checkout that a container for another processor shares."""
    here, other = ("x86_64", "aarch64") if platform.machine() != "aarch64" else ("aarch64", "x86_64")
    number = {name: code for code, name in library.ELF_MACHINES.items()}[other]
    blob = bytearray(Path(library.__file__).with_name(library.LIBRARY_NAME).read_bytes())
    blob[18:20] = number.to_bytes(2, "little")
    path = tmp_path / "foreign.so"
    path.write_bytes(blob)
    with pytest.raises(Unsupported, match=f"was built for {other}, but this machine is {here}.*build it: pip install"):
        Library(path)
    path.write_bytes(b"no library")
    with pytest.raises(Unsupported, match=r"cannot be loaded \(.*pip install"):
        Library(path)


def test_importing_the_engine_loads_nothing() -> None:
    """The library is loaded when an engine is opened, not when a module is imported."""
    code = "import llmserve.engine.cpu.runner; print('libllmserve' in open('/proc/self/maps').read())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def greedy(position: int) -> SampleRequest:
    return SampleRequest(SamplingParams(temperature=0.0), 0, position)


BAD_PLANS = {
    "token id 83 is not in": Chunk(0, [83], 0, [0]),
    "token id -1 is not in": Chunk(0, [-1], 0, [0]),
    "block 20 is not in": Chunk(0, [1], 0, [20]),
    "block -1 is not in": Chunk(0, [1], 0, [-1]),
    "block table is too short": Chunk(0, [1, 2, 3, 4, 5], 0, [0]),
    "longer than max_seq_len": Chunk(0, [1, 2], 95, list(range(20)) * 2),
    "do not cover": Chunk(0, [], 0, [0]),
    "token id of a sample request": Chunk(0, [1], 0, [0], dataclasses.replace(greedy(1), history=(99,))),
    "points outside": Chunk(0, [1], 0, [0], dataclasses.replace(greedy(1), history=(1,), num_prompt=2)),
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_plans_outside_of_the_engine_are_refused_and_leave_it_usable(
    message: str, path: Path, open_runner: OpenRunner
) -> None:
    opened = open_runner(path, num_blocks=20)
    wanted = all_logits(opened, [1, 2, 3])
    with pytest.raises(InternalError, match=message):
        opened.step(StepPlan((BAD_PLANS[message], Chunk(1, [1], 0, [3], greedy(1)))))
    assert (all_logits(opened, [1, 2, 3]) == wanted).all()


def test_states_outside_of_the_pool_are_refused(engine_file: EngineFile, open_runner: OpenRunner) -> None:
    opened = open_runner(engine_file("states", "float32", ""), num_blocks=20)
    wanted = all_logits(opened, [1, 2, 3])
    assert opened.info.num_states == LIMITS.max_batch_size
    for states, kept in (((0, 8), (0, 0)), ((8, 0), (0, 0)), ((0, 0), (8, 1)), ((0, 0), (1, 2))):
        with pytest.raises(InternalError, match="a state is outside of the 8 that there are"):
            opened.step(StepPlan((Chunk(0, [1, 2], 2, [0], states=states, kept_state=kept),)))
    assert (all_logits(opened, [1, 2, 3]) == wanted).all()


def test_a_network_with_states_needs_some(engine_file: EngineFile) -> None:
    with pytest.raises(InvalidArgument, match="number of states must be at least 1"):
        CpuRunner.open(engine_file("states", "float32", ""), num_blocks=20, num_states=0)


@pytest.mark.parametrize("is_kept_early", [True, False])
def test_a_state_goes_on_in_another_slot(is_kept_early: bool, engine_file: EngineFile, open_runner: OpenRunner) -> None:
    """The one that it came from stays what it was: two sequences may go on from it."""
    opened = open_runner(engine_file("states", "float32", ""), num_blocks=40)
    common, tails = random_ids(83, 16), [random_ids(83, 9, seed) for seed in (1, 2)]
    wanted = [all_logits(opened, common + tail)[16:] for tail in tails]
    if is_kept_early:
        chunk = Chunk(0, common + tails[0], 0, [9, 8, 7, 6, 10, 11, 12], states=(0, 2), kept_state=(5, 16))
    else:
        chunk = Chunk(0, common, 0, [9, 8, 7, 6], states=(0, 5))
    opened.step(StepPlan((chunk,)))
    tables = ([9, 8, 7, 6, 20, 21, 22], [9, 8, 7, 6, 30, 31, 32])
    chunks = (Chunk(i, tails[i], 16, tables[i], return_logits=True, states=(5, i)) for i in range(2))
    result = opened.step(StepPlan(tuple(chunks)))
    for i in range(2):
        np.testing.assert_array_equal(result.logits[i], wanted[i])


def test_more_chunks_or_tokens_than_the_engine_takes(path: Path, open_runner: OpenRunner) -> None:
    opened = open_runner(path)
    with pytest.raises(AssertionError):
        opened.step(StepPlan(tuple(Chunk(i, [1], 0, [i]) for i in range(9))))
    with pytest.raises(AssertionError):
        opened.step(StepPlan((Chunk(0, [1] * 97, 0, list(range(30))),)))


OVERFULL = {
    "a step of 97 tokens; the engine takes 1 to 96": StepPlan((Chunk(0, [1] * 97, 0, list(range(25))),)),
    "a step of 9 chunks; the engine takes at most 8": StepPlan(tuple(Chunk(i, [1], 0, [i]) for i in range(9))),
}


@pytest.mark.parametrize("message", OVERFULL)
def test_the_library_has_limits_of_its_own(message: str, path: Path) -> None:
    native = library.load_library()
    handle = native.open(path, isa="", num_blocks=30, threads=1)
    with pytest.raises(InvalidArgument, match=message):
        native.step(handle, FlatStep(OVERFULL[message], 83, StepMemory()).record)
    fitting = FlatStep(StepPlan((Chunk(0, [1], 0, [0], return_logits=True),)), 83, StepMemory())
    native.step(handle, fitting.record)
    assert np.isfinite(fitting.result().logits[0]).all()
    native.close(handle)


def test_greedy_decoding_step_by_step_equals_the_whole(path: Path, open_runner: OpenRunner) -> None:
    """Tokens sampled one at a time are the argmax of one prefill over the same text."""
    opened = open_runner(path, threads=2)
    ids = random_ids(83, 10)
    blocks = list(range(20, 40))
    step = Chunk(0, ids, 0, blocks, greedy(len(ids)))
    while len(ids) < 60:
        token = opened.step(StepPlan((step,))).tokens[0]
        ids.append(token)
        step = Chunk(0, [token], len(ids) - 1, blocks, greedy(len(ids)))
    assert all_logits(opened, ids).argmax(axis=1).tolist()[9:-1] == ids[10:]


def test_logits_and_a_sample_from_the_same_chunk(path: Path, open_runner: OpenRunner) -> None:
    opened = open_runner(path)
    chunks = (
        Chunk(0, [5, 6, 7], 0, [0], greedy(3), return_logits=True),
        Chunk(1, [1, 2], 0, [1]),
        Chunk(2, [9], 0, [2], greedy(1)),
        Chunk(3, [3, 1, 4, 1], 0, [3], return_logits=True),
    )
    result = opened.step(StepPlan(chunks))
    assert {index: logits.shape for index, logits in result.logits.items()} == {0: (3, 83), 3: (4, 83)}
    assert result.tokens == [result.logits[0][-1].argmax(), all_logits(opened, [9])[0].argmax()]


def test_logits_of_more_rows_than_sequences(path: Path, open_runner: OpenRunner) -> None:
    opened = open_runner(path)
    assert all_logits(opened, random_ids(83, 96)).shape == (96, 83)


@pytest.mark.parametrize("threads", [-1, 10**6, 2**40])
def test_a_number_of_threads_that_makes_no_sense_names_those_that_do(threads: int, path: Path) -> None:
    with pytest.raises(InvalidArgument, match=rf"threads must be 0 \(one per core\) to \d+, .* got {threads}"):
        CpuRunner.open(path, num_blocks=4, threads=threads)


@pytest.mark.parametrize("threads", [0, 1025, 2**32 - 1])
def test_the_library_refuses_threads_that_make_no_sense(threads: int, path: Path) -> None:
    with pytest.raises(InvalidArgument, match="threads must be 1 to 1024"):
        library.load_library().open(path, isa="", num_blocks=4, threads=threads)


def test_the_library_names_the_kernels_that_it_has(path: Path) -> None:
    names = ",".join(available_isas())
    with pytest.raises(InvalidArgument, match=f"no kernels 'mmx'; it has {names}"):
        library.load_library().open(path, isa="mmx", num_blocks=4, threads=1)
