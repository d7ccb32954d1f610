"""The kernels' test build, with address and undefined-behaviour sanitizers: every kernel of every instruction set on
buffers of exactly the needed size, the engine on damaged files, and steps of the variants that only this build has.

With LLMSERVE_STEPS_PROGRAM set it is the build that this program belongs to, as it was made."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmserve.engine.cpu.adapters import AdapterPacker
from llmserve.engine.cpu.runner import available_isas
from llmserve.scheduler.plan import StepPlan
from tests.engine.cpu.conftest import EngineFile, OpenRunner
from tests.engine.cpu.law import FORMATS, any_of, law
from tests.engine.cpu.networks import LIMITS, all_logits, encoder_network, odd_network, prefill, random_ids
from tests.engine.cpu.other_process import PROGRAM, variants
from tests.engine.cpu.test_adapters import parts_of
from tests.sealed_adapters import sealed

ROOT = Path(__file__).parents[3]
BUILD = ROOT / ".cmake-build" / "sanitize"  # kept: only what has changed is compiled again

pytestmark = pytest.mark.timeout(1200)  # the first build takes minutes on a busy machine

LEAKS = "detect_leaks=0" if PROGRAM else "detect_leaks=1"  # under an emulator they cannot be looked for
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # those of the virtual environment first


def run(*command: str | Path, **environment: str) -> str:
    variables = {**os.environ, "PATH": TOOLS, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=variables)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def programs() -> tuple[str, ...]:
    """The command of `kernel_steps`; `kernel_tests` lies beside it."""
    if PROGRAM:
        return PROGRAM
    if not (shutil.which("cmake", path=TOOLS) and shutil.which("ninja", path=TOOLS)):
        pytest.skip("cmake and ninja are not installed")
    options = ("-DLLMSERVE_TESTS=ON", "-DLLMSERVE_SANITIZE=ON", "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options)
    run("cmake", "--build", BUILD, "--parallel", "2")
    return (str(BUILD / "tests" / "engine" / "cpu" / "kernels" / "kernel_steps"),)


def test_kernels_and_damaged_files_under_sanitizers(programs: tuple[str, ...], tmp_path: Path) -> None:
    options = dataclasses.replace(LIMITS, quantization="int4", dtype="float16", tokens_per_block=2, max_num_tokens=16)
    parts = ({"peculiar": True}, {"experts": True}, {"plain": True, "experts": True}, {"states": True})
    networks = [*(odd_network(**own) for own in parts), encoder_network(), encoder_network(scores=True)]
    engines = [network.compile(tmp_path / f"{i}.engine", options) for i, network in enumerate(networks)]
    tests: tuple[str | Path, ...] = (*programs[:-1], Path(programs[-1]).with_name("kernel_tests"))
    output = run(*tests, tmp_path / "damaged.engine", *engines, ASAN_OPTIONS=LEAKS)
    assert [line.split()[0] for line in output.splitlines() if line.endswith("done")] == variants(programs)
    assert "damaged files were still well-formed" in output


@pytest.mark.skipif(bool(PROGRAM), reason="the tests of logits and determinism take the program too")
@pytest.mark.parametrize("form", FORMATS)
def test_the_twin_of_a_variant_that_cannot_run_here(
    form: tuple[str, str, str], programs: tuple[str, ...], engine_file: EngineFile, open_runner: OpenRunner
) -> None:
    """AVX-512 encodes the dot product of AVX-VNNI too: same source, same bits as AVX2 without it, same law."""
    if "avx2_vnni_twin" not in variants(programs):
        pytest.skip("needs a machine with AVX-512 VNNI")
    path, ids = engine_file("rope", *form), random_ids(83, 60)
    twins = [open_runner(path, isa="avx2_vnni_twin", threads=n, num_blocks=90, program=programs) for n in (1, 2, 3)]
    np.testing.assert_array_equal(all_logits(twins[0], ids), all_logits(open_runner(path, isa="avx2"), ids))
    law(twins[0], any_of(twins, path))


@pytest.mark.skipif(bool(PROGRAM), reason="adapters are tested with the instruction sets of this machine")
@pytest.mark.parametrize("form", [("float32", "", "auto"), ("bfloat16", "int8", "auto")])
def test_adapters_under_sanitizers(
    form: tuple[str, str, str],
    programs: tuple[str, ...],
    engine_file: EngineFile,
    open_runner: OpenRunner,
    tmp_path: Path,
) -> None:
    """Each matrix in memory of its own size: base and two adapters in one step, then one of them anew."""
    path, ids = engine_file("rope", *form), [random_ids(83, length, length) for length in (9, 5, 1, 7)]
    packer = AdapterPacker(path)
    packed = [packer.packed(sealed(tmp_path / str(seed), parts_of("rope", form[0], seed))) for seed in (1, 2)]
    for isa in variants(programs):
        here = "avx2" if isa == "avx2_vnni_twin" else isa  # with the same bits
        if here not in available_isas():
            continue
        found = []
        for program in (programs, ()):
            runner = open_runner(path, isa=isa if program else here, threads=2, num_blocks=90, program=program)
            for slot, adapter in enumerate(packed, 1):
                runner.load_adapter(slot, adapter)
            chunks = tuple(
                dataclasses.replace(
                    prefill(runner, each, first_block=20 * number), sequence_id=number, adapter=number % 3
                )
                for number, each in enumerate(ids)
            )
            logits = [*runner.step(StepPlan(chunks)).logits]
            runner.unload_adapter(1)
            runner.load_adapter(1, packed[1])
            logits += runner.step(StepPlan((dataclasses.replace(prefill(runner, ids[0]), adapter=1),))).logits
            found.append(logits)
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_installation_has_no_variant_of_the_tests() -> None:
    assert not [isa for isa in available_isas() if "twin" in isa]
