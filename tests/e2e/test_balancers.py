"""`deploy/haproxy` and `deploy/nginx`: the shipped configurations, real balancers, two real servers."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from tests.e2e.conftest import ROOT, ServerProcess, start_server
from tests.e2e.test_streaming import DOCUMENTS, Stream, client_inputs, metric
from tests.frontends.server import HOST, settled, wait_until
from tools.servers import free_ports

FETCHED = ROOT / ".balancers"
PROMPTS = [f"Summarize:\n{document}" for document in DOCUMENTS[:8]]
ADDRESS = re.compile(r"10\.0\.0\.1([12]):800([01])")
DELAY_S = 3  # of servers that leave; HAProxy needs less than 2
LONG = 300  # tokens


def program(name: str) -> str:
    if found := shutil.which(name):
        return found
    if (fetched := FETCHED / "usr/sbin" / name).exists():
        return str(fetched)
    pytest.skip(f"{name} is neither installed nor fetched: apt-get install {name}, or make .balancers/.tried")


def with_libraries() -> dict[str, str]:
    """Those that were fetched with it."""
    folders = [str(FETCHED / place / "x86_64-linux-gnu") for place in ("usr/lib", "lib")]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}


@dataclass
class Balancer:
    name: str
    folder: Path
    servers: list[ServerProcess]
    ports: list[int] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self.ports[0]}"

    @property
    def grpc(self) -> str:
        return f"{HOST}:{self.ports[1]}"

    @property
    def file(self) -> Path:
        return self.folder / "balancer.conf"

    def configuration(self) -> str:
        """What is shipped, with the addresses of here."""

        def here(found: re.Match[str]) -> str:
            server = self.servers[int(found[1]) - 1]
            return server.grpc if found[2] == "1" else server.http.removeprefix("http://")

        shipped = next((ROOT / "deploy" / self.name).iterdir()).read_text()
        text = ADDRESS.sub(here, shipped)
        for server in self.servers:  # where HAProxy asks for health
            text = re.sub(rf"({server.grpc} .*port) 8000", rf"\1 {server.ports['HTTPService']}", text)
        for port, own in zip(("8000", "8001"), self.ports, strict=True):
            text = re.sub(rf"(bind |listen ):?{port}\b", rf"\g<1>{HOST}:{own}", text)
        places = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        paths = "".join(f"    {place}_temp_path {self.folder / place};\n" for place in places)
        return text.replace("    access_log off;\n", f"    access_log off;\n{paths}")

    def command(self, *more: str) -> list[str]:
        if self.name == "haproxy":
            return [program(self.name), "-db", "-f", str(self.file), *more]
        settings = f"daemon off; user root; pid {self.folder / 'pid'}; error_log {self.folder / 'errors'};"
        return [program(self.name), "-p", str(self.folder), "-c", str(self.file), "-g", settings, *more]

    def start(self) -> None:
        """On ports that nobody has taken since they were free."""
        for _ in range(5):
            self.ports = free_ports(2)
            self.file.write_text(self.configuration())
            self._process = subprocess.Popen(
                self.command(), env=with_libraries(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            wait_until(lambda: self.has_ended() or self.is_ready())
            if not self.has_ended():
                return
        raise AssertionError(f"{self.name} does not start")

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.http}/v2/health/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def reload_without(self, number: int) -> None:
        """As docs/balancing.md says for nginx."""
        text = self.file.read_text()
        for address in (self.servers[number].grpc, self.servers[number].http.removeprefix("http://")):
            text = text.replace(f"server {address} ", f"server {address} down ")
        self.file.write_text(text)
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)
        time.sleep(1)  # until its new workers have the sockets

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGINT if self.name == "haproxy" else signal.SIGTERM)
            self._process.wait(20)
        for server in self.servers:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


@pytest.fixture(params=["haproxy", "nginx"])
def balancer(request: pytest.FixtureRequest, demo_engine: Path, tmp_path: Path) -> Iterator[Balancer]:
    program(request.param)
    flags = (str(demo_engine), "--threads", "1", "--shutdown-delay-secs", str(DELAY_S))
    made = Balancer(request.param, tmp_path, [])
    try:
        made.servers += [start_server(*flags) for _ in range(2)]
        made.start()
        yield made
    finally:
        made.close()


def ignore() -> None:
    pass


def over_http(
    target: Balancer | ServerProcess, prompt: str, max_tokens: int, heard: Callable[[], None] = ignore
) -> str:
    """OpenAI's client, which tries again where a connection is closed before an answer begins, as it does by itself."""
    with openai.OpenAI(base_url=f"{target.http}/v1", api_key="none") as client:
        asked = {"ignore_eos": True}
        stream = client.completions.create(
            model="ensemble", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body=asked
        )
        text = ""
        for chunk in stream:
            heard()
            text += "".join(choice.text for choice in chunk.choices)
        return text


def over_grpc(
    target: Balancer | ServerProcess, prompt: str, max_tokens: int, heard: Callable[[], None] = ignore
) -> str:
    stream = Stream(target.grpc)
    try:
        stream.send("ensemble", client_inputs(prompt, max_tokens=max_tokens))
        text = ""
        for result in stream.responses():
            heard()
            if (piece := result.as_numpy("text_output")) is not None:
                text += piece.reshape(-1)[0].decode()
        return text
    finally:
        stream.close()


ASKS = (over_http, over_grpc)


def test_both_configurations_are_what_their_programs_take() -> None:
    """As shipped, with their own addresses."""
    file = str(ROOT / "deploy/haproxy/haproxy.cfg")
    done = subprocess.run([program("haproxy"), "-c", "-f", file], env=with_libraries(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    file = str(ROOT / "deploy/nginx/nginx.conf")
    done = subprocess.run([program("nginx"), "-t", "-c", file], env=with_libraries(), capture_output=True, text=True)
    assert "syntax is ok" in done.stderr


def test_clients_find_behind_it_what_they_find_without(balancer: Balancer) -> None:
    for ask in ASKS:
        for prompt in PROMPTS[:3]:
            assert ask(balancer, prompt, 24) == ask(balancer.servers[0], prompt, 24)
    with triton.InferenceServerClient(balancer.grpc) as client:
        assert client.is_server_ready()
        assert client.get_model_metadata("ensemble").name == "ensemble"


async def over_one_channel(url: str, count: int) -> list[int]:
    """So many answers at once; how many pieces each had."""
    async with triton_aio.InferenceServerClient(url) as client:

        async def answer(number: int) -> int:
            async def requests() -> AsyncIterator[dict[str, Any]]:
                inputs = client_inputs(PROMPTS[number % len(PROMPTS)], max_tokens=64)
                yield {"model_name": "ensemble", "inputs": inputs, "enable_empty_final_response": True}

            pieces = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None, error
                pieces += result.as_numpy("text_output") is not None
            return pieces

        return await asyncio.gather(*map(answer, range(count)))


def test_answers_of_one_connection_are_shared_out(balancer: Balancer) -> None:
    """A channel of gRPC is one connection, and a balancer of connections would give all of it to one server."""
    pieces = asyncio.run(over_one_channel(balancer.grpc, 16))
    assert min(pieces) > 1
    shares = [metric(server, "nv_inference_request_success", 'model="ensemble"') for server in balancer.servers]
    assert sum(shares) == 16
    assert min(shares) >= 5


def test_a_server_that_leaves_is_not_missed(balancer: Balancer) -> None:
    """Under load over both protocols: every answer comes whole, and the server ends when its own have."""
    wanted = {(ask, prompt): ask(balancer.servers[1], prompt, 48) for ask in ASKS for prompt in PROMPTS}
    stop = threading.Event()
    failures: list[str] = []
    answered: list[float] = []

    def user(number: int) -> None:
        ask = ASKS[number % 2]
        while not stop.is_set():
            prompt = PROMPTS[len(answered) % len(PROMPTS)]
            try:
                found = ask(balancer, prompt, 48)
                answered.append(time.monotonic())
                if found != wanted[ask, prompt]:
                    failures.append(f"{ask.__name__}: {found!r}")
            except Exception as error:
                failures.append(f"{ask.__name__}: {error!r}")

    users = [threading.Thread(target=user, args=(number,)) for number in range(6)]
    for each in users:
        each.start()
    try:
        wait_until(lambda: len(answered) > 12)
        if balancer.name == "nginx":
            balancer.reload_without(0)
        leaving = balancer.servers[0].process
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(30) == 0
        left = time.monotonic()
        wait_until(lambda: answered[-1] > left + 0.5)
    finally:
        stop.set()
        for each in users:
            each.join()
    assert failures == []


def test_a_server_that_is_killed_takes_only_its_own_answers(balancer: Balancer) -> None:
    """They end in errors, not in half an answer that looks whole; and whoever asks then is answered by the other."""
    asked = [(ASKS[number % 2], PROMPTS[number % len(PROMPTS)]) for number in range(12)]
    wanted = [ask(balancer.servers[1], prompt, LONG) for ask, prompt in asked]
    killed = balancer.servers[0].process
    killed.send_signal(signal.SIGSTOP)  # so that none of its answers ends before it is killed
    with ThreadPoolExecutor(len(asked)) as pool:
        heard: list[None] = []
        answers = [pool.submit(ask, balancer, prompt, LONG, partial(heard.append, None)) for ask, prompt in asked]
        wait_until(lambda: any(answer.done() for answer in answers))
        settled(lambda: sum(answer.done() for answer in answers), at_most=len(asked) - 1)
        before = len(heard)

        def says_a_little() -> bool:
            killed.send_signal(signal.SIGCONT)
            time.sleep(0.005)
            killed.send_signal(signal.SIGSTOP)
            return len(heard) > before

        wait_until(says_a_little)
        killed.kill()
    broken = [answer.exception() is not None for answer in answers]
    assert 0 < sum(broken) < len(asked)
    for answer, text in zip(answers, wanted, strict=True):
        assert answer.exception() is not None or answer.result() == text
    for number in range(12):
        ask, prompt = ASKS[number % 2], PROMPTS[number % len(PROMPTS)]
        assert ask(balancer, prompt, 8) == ask(balancer.servers[1], prompt, 8)
