"""`deploy/`: a real Prometheus scrapes a real server under a little load, and all that is asked of it has an answer."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from llmserve.metrics import METRICS
from tests.e2e.conftest import ROOT, ServerProcess, start_server
from tests.frontends.server import HOST, wait_until
from tools.servers import free_ports

FETCHED = ROOT / ".prometheus/usr/bin"
RULES, CONFIG = ROOT / "deploy/prometheus/alerts.yml", ROOT / "deploy/prometheus/prometheus.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/llmserve.json").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
QUERIES = {
    f"{panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
}
METRIC = re.compile(r"\b(?:up|nv_\w+|llmserve_\w+)\b(?:\{[^}]*\})?")
SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
LOAD_S = 6
KEYS = ("team-0-0123456789abcdef", "team-1-0123456789abcdef")
RANGE = "4s"  # over which rates are taken here


def program(name: str) -> str:
    found = shutil.which(name) or (str(FETCHED / name) if (FETCHED / name).exists() else None)
    if found is None:
        pytest.skip(f"{name} is neither installed nor fetched: apt-get install prometheus, or make .prometheus/.tried")
    return found


def checked(*command: str) -> None:
    done = subprocess.run([program("promtool"), *command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_what_prometheus_takes() -> None:
    checked("check", "config", str(CONFIG))
    checked("check", "rules", str(RULES))


def test_each_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "alerts.test.yml"
    file.write_text((ROOT / "tests/e2e/alerts.test.yml").read_text().replace("[RULES]", f'["{RULES}"]'))
    checked("test", "rules", str(file))
    text = file.read_text()
    assert [alert["alert"] for alert in ALERTS if alert["alert"] not in text] == []


def test_only_metrics_that_there_are_is_asked_for() -> None:
    asked = [*QUERIES.values(), *(alert["expr"] for alert in ALERTS)]
    names = {found.partition("{")[0] for expression in asked for found in METRIC.findall(expression)}
    assert {name for name in names if not {name, SUFFIX.sub("", name)} & METRICS.keys()} == {"up"}


def test_panels_have_a_place_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for number, one in enumerate(places):
        assert one["x"] + one["w"] <= 24
        for other in places[:number]:
            apart_x = one["x"] >= other["x"] + other["w"] or other["x"] >= one["x"] + one["w"]
            apart_y = one["y"] >= other["y"] + other["h"] or other["y"] >= one["y"] + one["h"]
            assert apart_x or apart_y, (one, other)


class Prometheus:
    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://{HOST}:{port}", timeout=10)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        found = self.get("/api/v1/query", query=expression)["result"]
        return [value for each in found if not math.isnan(value := float(each["value"][1]))]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def busy(demo_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    entries = (f"{{name: team-{number}, key: {key}, max_answers: 1}}" for number, key in enumerate(KEYS))
    keys.write_text(f"keys: [{', '.join(entries)}]")
    server = start_server(str(demo_engine), "--cache-config", "local,size=1048576", "--api-keys", str(keys))
    stop = threading.Event()
    with ThreadPoolExecutor(2) as clients:
        asking = [clients.submit(_ask, server, stop, number) for number in range(2)]
        yield server
        stop.set()
        for each in asking:
            each.result(60)
    server.process.terminate()
    assert server.process.wait(60) == 0


def _ask(server: ServerProcess, stop: threading.Event, number: int) -> None:
    """A third of what it asks is more than its key may: another answer while one is under way."""
    with openai.OpenAI(base_url=f"{server.http}/v1", api_key=KEYS[number], max_retries=0) as client:
        for count in itertools.count():
            if stop.wait(0.05):
                return
            question = f"Summarize: The connection {number} is closed. Any pending data is sent before."
            stream = client.chat.completions.create(
                model="ensemble", messages=[{"role": "user", "content": question}], stream=True,
                max_tokens=300 if count % 2 else 12, extra_body={"ignore_eos": True},
            )  # fmt: skip
            for place, _ in enumerate(stream):
                if count % 2 and place == 0:
                    with suppress(openai.RateLimitError):  # the first one may have ended, on a busy machine
                        client.completions.create(model="ensemble", prompt="x", max_tokens=1)


@pytest.fixture(scope="module")
def prometheus(busy: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    command, folder = program("prometheus"), tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"{HOST}:{busy.ports['Metrics Service']}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(RULES, folder)
    (port,) = free_ports(1)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [command, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={HOST}:{port}"], stdout=log, stderr=log,
        )  # fmt: skip
    made = Prometheus(port)
    try:
        wait_until(made.is_ready, 30)
        wait_until(lambda: made.values('up{job="llmserve"}') == [1.0], 20)
        time.sleep(LOAD_S)
        yield made
    finally:
        made.close()
        process.terminate()
        process.wait(20)


def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus) -> None:
    filled = {
        title: query.replace("$__rate_interval", RANGE).replace("$model", ".+").replace("$key", ".+")
        for title, query in QUERIES.items()
    }
    assert not any("$" in query for query in filled.values())
    empty = [f"{title}: {query}" for title, query in filled.items() if not prometheus.values(query)]
    assert empty == []
    shown = {title: max(prometheus.values(query)) for title, query in filled.items()}
    assert shown["Requests a second A"] > 0
    assert shown["Output tokens a second A"] > 0
    assert 0 < shown["First token, p99 A"] < 60
    assert 0 < shown["End to end A"] < 60
    assert shown["Requests that fail A"] == 0  # refusals of a key are none
    assert shown["Requests by key A"] > 0
    assert shown["Refusals by limit A"] > 0
    assert shown["Tokens by key B"] > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", {"ensemble", "preprocessing", "tensorrt_llm", "postprocessing"}),
        ("key", {"team-0", "team-1"}),
    ],
)
def test_there_is_something_to_choose_from(prometheus: Prometheus, name: str, expected: set[str]) -> None:
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == name)
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
    assert expected <= set(prometheus.get(f"/api/v1/label/{label}/values", **{"match[]": metric}))


def test_every_alert_is_evaluated_on_what_the_server_shows(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("/api/v1/rules")["groups"]
    assert [rule["name"] for rule in group["rules"]] == [alert["alert"] for alert in ALERTS]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    selectors = {found for alert in ALERTS for found in METRIC.findall(alert["expr"])}
    assert [selector for selector in selectors if not prometheus.values(selector)] == []
    assert {rule["state"] for rule in group["rules"]} == {"inactive"}
