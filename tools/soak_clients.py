"""Runs thousands of streaming clients, each in its own process: `make soak-clients`.

They send requests to `llmserve serve ENGINE --model-repository REPOSITORY`, with a repository like
tensorrtllm_backend's. As many clients go through grpcio's server in front of it, to show effects of our own wire. A
share of the runs is starved: many clients and some busy processes on one core. Every text must equal that of `llmserve
run`, and every client must end. Spaces are not compared: a postprocessing that decodes tokens one by one loses some.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.published import LATER, RELEASES, write_published_repository
from tools.benchmark.options import say
from tools.servers import HOST, llmserve_server

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "tools" / "client_soak" / "client.py"
PROMPT = (
    "Summarize:\nReturn the time in seconds since the epoch as a floating point number, and raise if there is none."
)
MAX_TOKENS = 24
AT_ONCE = {"quiet": 2, "starved": 12}
NUM_BUSY = 4  # processes that keep the starved core busy
HANG_S = {"quiet": 60.0, "starved": 300.0}
STACKS_S = 10.0  # for a hanging client to print its stacks


@dataclass(frozen=True, slots=True)
class Run:
    machine: str  # "quiet" or "starved"
    wire: str  # "llmserve" or "grpcio"
    outcome: str  # "equal", or what was wrong
    seconds: float


def main() -> None:
    given = options()
    num_starved = round(given.runs * given.starved)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        repository = write_published_repository(folder / "repository", release=given.release)
        engine = str(given.engine)
        server = running.enter_context(llmserve_server(repository, folder / "llmserve.txt", engine))
        wires = {"llmserve": server.grpc, "grpcio": running.enter_context(relay(server.grpc))}
        expected = text_of_run(engine)
        say(f"every answer must be {expected!r}")
        runs = soak("quiet", given.runs - num_starved, wires, expected)
        with starved_core():
            runs += soak("starved", num_starved, wires, expected)
    say(table(runs))
    if any(run.outcome != "equal" for run in runs if run.wire == "llmserve"):
        sys.exit(1)


def soak(machine: str, num_runs: int, wires: dict[str, str], expected: str) -> list[Run]:
    """Runs `num_runs` clients of each wire, in turn."""
    wanted = [(wire, address) for _ in range(num_runs) for wire, address in wires.items()]

    def one(number: int) -> Run:
        wire, address = wanted[number]
        began = time.monotonic()
        outcome = outcome_of(address, expected, HANG_S[machine])
        if outcome != "equal":
            say(f"{machine}, {wire}, run {number}: {outcome}")
        return Run(machine, wire, outcome.splitlines()[0], time.monotonic() - began)

    with ThreadPoolExecutor(AT_ONCE[machine]) as pool:
        return list(pool.map(one, range(len(wanted))))


def outcome_of(address: str, expected: str, hang_s: float) -> str:
    command = [sys.executable, "-X", "faulthandler", str(CLIENT), address, PROMPT, str(MAX_TOKENS)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        text, problems = client.communicate(timeout=hang_s)
    except subprocess.TimeoutExpired:
        client.send_signal(signal.SIGABRT)  # faulthandler prints each thread's stack
        try:
            text, problems = client.communicate(timeout=STACKS_S)
        except subprocess.TimeoutExpired:
            client.kill()
            text, problems = client.communicate()
        return f"hangs, {'after' if letters(text) == expected else 'before'} its answer\n{problems}"
    if client.returncode != 0:
        return f"exit code {client.returncode}\n{problems}"
    return "equal" if letters(text) == expected else f"another text: {text!r}"


def letters(text: str) -> str:
    return "".join(text.split())


def text_of_run(engine: str) -> str:
    """Returns the answer of `llmserve run`."""
    command = [str(Path(sys.executable).parent / "llmserve"), "run", engine, "--input-text", PROMPT]
    done = subprocess.run(
        [*command, "--max-output-len", str(MAX_TOKENS)], check=True, stdout=subprocess.PIPE, text=True
    )
    (answer,) = re.findall(r"^--> (.*?)  \(\w+\)$", done.stdout, re.MULTILINE | re.DOTALL)
    return letters(answer)


@contextmanager
def relay(target: str) -> Iterator[str]:
    """Yields the address of grpcio's server in front of `target`."""
    command = [sys.executable, "-m", "tools.client_soak.relay", target]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"{HOST}:{int(process.stdout.readline())}"
        finally:
            process.terminate()


@contextmanager
def starved_core() -> Iterator[None]:
    """Makes this process, and those that it starts, share one core with processes that never wait."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, own)


def table(runs: Sequence[Run]) -> str:
    rows = ["| machine | wire | runs | equal | not | median s | slowest s |", "|---|---|---|---|---|---|---|"]
    for machine, wire in sorted({(run.machine, run.wire) for run in runs}):
        those = [run for run in runs if (run.machine, run.wire) == (machine, wire)]
        seconds = sorted(run.seconds for run in those)
        num_equal = sum(run.outcome == "equal" for run in those)
        rows.append(
            f"| {machine} | {wire} | {len(those)} | {num_equal} | {len(those) - num_equal} "
            f"| {seconds[len(seconds) // 2]:.2f} | {seconds[-1]:.2f} |"
        )
    return "\n".join(rows)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, required=True)
    later = RELEASES[RELEASES.index("0.7.1") :]  # earlier releases have counts of another type
    parser.add_argument("--release", choices=later, default=LATER, help="of tensorrtllm_backend")
    parser.add_argument("--runs", type=int, default=2000, help="of each wire")
    parser.add_argument("--starved", type=float, default=0.25, help="share of the runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
