"""A batch in a real server that is killed in the middle, and live requests beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from tests.e2e.conftest import start_server
from tests.e2e.test_openai import ANSWER, MODEL, QUESTION
from tests.frontends.server import wait_until

ENDPOINT: Any = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0,
}  # fmt: skip
NUM_REQUESTS = 400


def num_answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def test_a_server_that_is_killed_answers_each_request_of_a_batch_once(demo_engine: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": {**BODY, "ignore_eos": number % 2 == 1}}
        for number in range(NUM_REQUESTS)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    options = (str(demo_engine), "--batch-dir", str(tmp_path / "batches"))
    server = start_server(*options)
    try:
        with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
            file = client.files.create(file=("requests.jsonl", content), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
            wait_until(lambda: num_answered(client, batch.id) > 20)
            live = client.chat.completions.create(**BODY)
            assert live.choices[0].message.content == ANSWER
            assert num_answered(client, batch.id) < NUM_REQUESTS
    finally:
        server.process.kill()
        server.process.wait(timeout=60)
    server = start_server(*options)
    try:
        with openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as client:
            wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
            done = client.batches.retrieve(batch.id)
            assert done.output_file_id is not None
            assert done.error_file_id is None
            found = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    finally:
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0
    assert [line["custom_id"] for line in found] == [f"r{number}" for number in range(NUM_REQUESTS)]
    texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in found[::2]}
    assert texts == {ANSWER}
