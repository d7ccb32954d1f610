"""`make plan-fleet` on Dynamo's simulator; and, with FLEET_STRICT=1, a real cluster beside the simulated one."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import timed_worker
from tools.cluster.local import ENVIRONMENT, ROOT, LocalCluster, is_there
from tools.fleet.traffic import BLOCK, Kind, Request, drawn, lines

pytestmark = pytest.mark.skipif(not is_there(), reason="there is no Dynamo: make .venv-cluster/.created")
IS_STRICT = bool(os.environ.get("FLEET_STRICT"))
STEP_S, TOKEN_S, KV_TOKENS, BATCH, MAX_TOKENS = 0.02, 0.0005, 8192, 8, 512
NUM_WORKERS, RATE, NUM_REQUESTS = 2, 6.0, 150 if IS_STRICT else 30
SIMULATE = """
import json, sys
from pathlib import Path
from tools.fleet.costs import StepCosts
from tools.fleet.simulated import Fleet, Limits, Replica
from tools.fleet.traffic import read
folder, replicas, step_s, token_s, kv_tokens, batch, max_tokens = json.loads(sys.argv[1])
costs = StepCosts(token_s, {1: step_s, batch: step_s})
replica = Replica(costs, batch, 2048, kv_tokens, max_tokens)
found = []
for share in (0.5, 0.95):
    fleet = Fleet(Path(folder), replica, read(Path(folder) / "requests.jsonl"), Limits(2, 1, share))
    outcome = fleet.outcome(replicas)
    found.append([outcome.first_token_s, outcome.between_tokens_s, outcome.seconds])
print(json.dumps(found))
"""


def python(*arguments: str) -> str:
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", *arguments], cwd=ROOT, env=os.environ | {"DYN_LOG": "error"}, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]


def test_more_load_needs_more_replicas_and_caches_save_some() -> None:
    flags = ("--first-token", "6", "--between-tokens", "0.3", "--minutes", "1.5", "--prefixes", "64")
    found = rows(
        python("-m", "tools.fleet", "--rate", "1", "8", "--prefix-tokens", "1024", "--kv-tokens", "16384", *flags)
    )
    few, many = ([int(cell) for cell in row[1:3]] for row in found)
    assert 1 <= few[0] < many[0] < many[1]  # routed by cached prefixes, and by turns
    assert float(found[1][3].rstrip("%")) > float(found[1][4].rstrip("%"))
    assert float(found[1][7].rstrip("%")) >= 95
    assert float(found[1][9].rstrip("%")) < float(found[1][7].rstrip("%"))  # half of them, and the rest a minute late
    (nobody,) = rows(python("-m", "tools.fleet", "--rate", "1", *flags, "--most", "2", "--first-token", "0.001"))
    assert nobody[1] == "more than 2"


class Load:
    """Asks a cluster what was drawn, when it was drawn, from a thread for each request."""

    def __init__(self, url: str, requests: Sequence[Request]) -> None:
        self._url, self._requests = url, requests
        self.pieces_s: list[list[float]] = [[] for _ in requests]  # since each request was sent

    def run(self) -> float:
        """Seconds until the last answer has ended."""
        began, threads = time.perf_counter(), []
        for number, request in enumerate(self._requests):
            time.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            threads.append(threading.Thread(target=self._ask, args=(number,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

    def _ask(self, number: int) -> None:
        asked = self._requests[number]
        prompt = [1000 + (37 * block + 11 * place) % 3000 for block in asked.blocks for place in range(BLOCK)]
        body = {"model": "demo", "prompt": prompt[: asked.num_prompt_tokens], "max_tokens": asked.num_answer_tokens,
                "stream": True, "ignore_eos": True}  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.pieces_s[number].append(time.perf_counter() - began)


def test_a_cluster_of_timed_workers_is_as_fast_as_the_simulated_one(
    demo_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {timed_worker.STEP_S: STEP_S, timed_worker.TOKEN_S: TOKEN_S, timed_worker.KV_TOKENS: KV_TOKENS}
    for name, value in (told | {timed_worker.BATCH: BATCH}).items():
        monkeypatch.setenv(name, str(value))
    kind = Kind(200, 0.5, 30, 0.5, 1.0)
    requests = drawn(kind, RATE, NUM_REQUESTS, max_tokens=480, num_prefixes=8, prefix_tokens=96)
    (tmp_path / "requests.jsonl").write_text("\n".join(lines(requests)))
    given = [str(tmp_path), NUM_WORKERS, STEP_S, TOKEN_S, KV_TOKENS, BATCH, MAX_TOKENS]
    middle, high = np.array(json.loads(python("-c", SIMULATE, json.dumps(given))))
    cluster = LocalCluster(
        tmp_path / "cluster", demo_engine, num_workers=NUM_WORKERS, worker_flags=("--speculation", "off"),
        worker=("python", "-m", timed_worker.__name__),
    )  # fmt: skip
    try:
        load = Load(cluster.url, requests)
        seconds = load.run()
    finally:
        cluster.close()
    assert [len(pieces) for pieces in load.pieces_s] == [one.num_answer_tokens for one in requests]
    firsts = [pieces[0] for pieces in load.pieces_s]
    gaps = np.concatenate([np.diff(pieces) for pieces in load.pieces_s])
    for simulated, quantile in ((middle, 0.5), (high, 0.95)):
        measured = [np.quantile(firsts, quantile), np.quantile(gaps, quantile), seconds]
        print("quantile", quantile, "measured", measured, "simulated", simulated)
        if IS_STRICT:
            assert measured == pytest.approx(simulated, rel=0.15)
