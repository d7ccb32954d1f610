"""A public model repository, served as it is by `llmserve serve ENGINE --model-repository REPO`: its Python models read
the tokenizer with transformers, clients of its time ask over gRPC.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from numpy.typing import NDArray

from llmserve.engine.directory.manifest import Manifest
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from tests.checkpoints import make_checkpoint
from tests.e2e.conftest import CHECKPOINT, ServerProcess, llmserve, start_server
from tests.e2e.published import LATER, RELEASES, write_published_repository
from tests.e2e.test_streaming import DOCUMENTS, Stream, client_inputs, streamed_text, tensor
from tests.engine.directories import seal

TOKENIZER = Path(__file__).with_name("tokenizer")  # code that a checkpoint brings
PROMPTS = [f"Summarize:\n{document}" for document in DOCUMENTS[:6]]
NUM_TOKENS = 24
NUM_RUNS = int(os.environ.get("PUBLISHED_RUNS", "2"))  # of each release's two clients


@pytest.fixture(scope="module")
def llama_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer is a `tokenizer.model` and nothing else, of a class that transformers has."""
    path = tmp_path_factory.mktemp("llama")
    checkpoint = make_checkpoint(path / "checkpoint", "llama")
    done = llmserve("build", str(checkpoint), "--dtype", "float32", "--output-dir", str(path / "engine"))
    assert done.returncode == 0, done.stderr
    return path / "engine"


@pytest.fixture(scope="module")
def own_code_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo engine, of a checkpoint whose tokenizer is code of its own (`auto_map`), as Baichuan2's is."""
    path = tmp_path_factory.mktemp("own-code")
    shutil.copytree(CHECKPOINT, path / "checkpoint")
    for file in TOKENIZER.glob("*.py"):
        shutil.copy(file, path / "checkpoint")
    config = path / "checkpoint/tokenizer_config.json"
    named = {"AutoTokenizer": ["tokenization_pieces.PiecesTokenizer", None]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": named}))
    done = llmserve("build", str(path / "checkpoint"), "--output-dir", str(path / "engine"))
    assert done.returncode == 0, done.stderr
    return path / "engine"


@contextmanager
def served(engine: Path, folder: Path, release: str = LATER) -> Iterator[ServerProcess]:
    repository = write_published_repository(folder / "repository", release=release)
    server = start_server(str(engine), "--model-repository", str(repository), env=apart(folder))
    try:
        yield server
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def published(demo_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with served(demo_engine, tmp_path_factory.mktemp("published")) as server:
        yield server


def apart(folder: Path) -> dict[str, str]:
    """The environment of a process whose transformers keeps the code that it runs in a place of its own, offline."""
    return {**os.environ, "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1"}


@cache
def answers_of_run(engine: Path) -> list[str]:
    """What `llmserve run` says to each of PROMPTS, in NUM_TOKENS at most."""
    arguments = [part for prompt in PROMPTS for part in ("--input-text", prompt)]
    done = llmserve("run", str(engine), *arguments, "--max-output-len", str(NUM_TOKENS))
    assert done.returncode == 0, done.stderr
    return re.findall(r"^--> (.*?)  \((?:end_id|length|stop_words)\)$", done.stdout, re.MULTILINE | re.DOTALL)


def answers_of_server(server: ServerProcess) -> list[str]:
    """The same, through the ensemble."""
    return ["".join(streamed_text(server.grpc, text, max_tokens=NUM_TOKENS, stream=False)) for text in PROMPTS]


def prompt_ids(url: str, text: str) -> list[int]:
    """What the model `preprocessing` makes of a text."""
    inputs = [tensor("QUERY", text.encode(), object), tensor("REQUEST_OUTPUT_LEN", 1, np.int32)]
    with triton.InferenceServerClient(url) as client:
        ids: list[int] = client.infer("preprocessing", inputs).as_numpy("INPUT_ID")[0].tolist()
    return ids


def test_a_tokenizer_model_alone_is_enough_for_the_classes_of_transformers(llama_engine: Path, tmp_path: Path) -> None:
    assert not (llama_engine / "tokenizer.json").exists()
    own = Preprocessor.open(llama_engine)
    texts = ["The small red fox", "two  spaces", "naïve: 天气", PROMPTS[0]]
    with served(llama_engine, tmp_path) as server:
        assert [prompt_ids(server.grpc, text) for text in texts] == [
            list(own.prepare(TextPrompt(text)).input_ids) for text in texts
        ]


def test_answers_are_those_of_llmserve_run(published: ServerProcess, demo_engine: Path) -> None:
    expected = answers_of_run(demo_engine)
    assert len(set(expected)) == len(PROMPTS)
    answers = answers_of_server(published)
    assert answers == expected


def client_of(release: str, prompt: str, *, stream: bool) -> list[triton.InferInput]:
    """What the client of that release sends: counts are unsigned before 0.7, a seed has another name from 0.17 on."""
    count = np.uint32 if release in ("0.5", "0.6.1") else np.int32
    counts = {"max_tokens": NUM_TOKENS, "beam_width": 1}
    inputs = [one for one in client_inputs(prompt, stream=stream) if one.name() not in {*counts, "random_seed"}]
    inputs += [tensor(name, value, count) for name, value in counts.items()]
    return [*inputs, tensor("seed" if release == "0.17" else "random_seed", 7, np.uint64)]


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_answers_its_client_streamed_and_unary(release: str, demo_engine: Path, tmp_path: Path) -> None:
    """Those until 0.8 have a postprocessing that requires log-probs, whether the client has asked for them or not."""
    expected = dict(zip(PROMPTS, answers_of_run(demo_engine), strict=True))
    with served(demo_engine, tmp_path, release) as server:
        for prompt, text in islice(cycle(expected.items()), NUM_RUNS):
            pieces = [
                texts_of(server.grpc, client_of(release, prompt, stream=True)),
                texts_of(server.grpc, client_of(release, prompt, stream=False)),
            ]
            assert len(pieces[0]) > 3
            assert "".join(pieces[0]).replace(" ", "") == text.replace(" ", "")
            assert pieces[1] == [text]
        if release not in ("0.5", "0.17"):
            asked = [*client_of(release, PROMPTS[0], stream=False), tensor("return_log_probs", True, bool)]
            assert log_probs(server.grpc, asked).min() < 0
            assert not log_probs(server.grpc, asked[:-1]).any()


def texts_of(url: str, inputs: list[triton.InferInput]) -> list[str]:
    stream = Stream(url)
    try:
        stream.send("ensemble", inputs)
        outputs = [result.as_numpy("text_output") for result in stream.responses()]
        return [output.reshape(-1)[0].decode() for output in outputs if output is not None]
    finally:
        stream.close()


def log_probs(url: str, inputs: list[triton.InferInput]) -> NDArray[np.float32]:
    stream = Stream(url)
    try:
        stream.send("ensemble", inputs)
        found: NDArray[np.float32] = next(stream.responses()).as_numpy("output_log_probs")
        return found
    finally:
        stream.close()


def test_openais_api_asks_for_what_it_knows(published: ServerProcess, demo_engine: Path) -> None:
    expected = answers_of_run(demo_engine)[0]
    asked = {"model": "ensemble", "prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0}
    with httpx.Client(base_url=published.http, timeout=60) as client:
        whole = client.post("/v1/completions", json=asked).json()
        [choice] = whole["choices"]
        known = {"text": expected, "index": 0, "logprobs": None, "finish_reason": "stop"}
        assert choice == {**dict.fromkeys(choice), **known}, "members of vLLM's are null"
        assert whole["usage"] is None
        events = client.post("/v1/completions", json={**asked, "stream": True}).text.split("\n\n")[:-2]
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == expected
        assert choices[-1]["finish_reason"] == "stop"
        drawn = {**asked, "temperature": 1.0, "seed": 3, "stop": ["x"], "presence_penalty": 0.5, "min_tokens": 2}
        assert client.post("/v1/completions", json=drawn).status_code == 200
        for more, words in (({"n": 2}, "does not support n:"), ({"logprobs": 0}, "does not support logprobs")):
            assert words in client.post("/v1/completions", json={**asked, **more}).json()["error"]["message"]
        chat = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}]}
        assert "special tokens that have no text form" in client.post("/v1/chat/completions", json=chat).text


def test_a_tokenizer_of_its_own_code_is_in_the_engine(own_code_engine: Path, demo_engine: Path, tmp_path: Path) -> None:
    expected = answers_of_run(demo_engine)
    with served(own_code_engine, tmp_path) as server:
        assert list((tmp_path / "huggingface/modules").rglob("tokenization_pieces.py"))  # that is what has run
        answers = answers_of_server(server)
    assert answers == expected


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "engine has no tokenization_pieces.py: rebuild the engine"),
        (
            "from .pieces_files import *\nraise AttributeError('sp_model')",
            "(tokenization_pieces.py), which fails with the installed transformers",
        ),
    ],
    ids=["an engine without it", "code of another time"],
)
def test_a_tokenizer_that_does_not_load_is_told_what_to_do(
    own_code_engine: Path, tmp_path: Path, code: str | None, said: str
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(own_code_engine, engine)
    (engine / "tokenization_pieces.py").unlink()
    if code is not None:
        (engine / "tokenization_pieces.py").write_text(code)
    seal(engine, Manifest.from_json((engine / "manifest.json").read_text()))
    repository = write_published_repository(tmp_path / "repository")
    free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    done = llmserve("serve", str(engine), "--model-repository", str(repository), *free, env=apart(tmp_path))
    assert done.returncode == 1
    rows = (line.split("|") for line in done.stdout.splitlines() if line.startswith("|"))
    status = " ".join(row[3].strip() for row in rows)
    assert said in status
    assert "--parameter preprocessing.tokenizer_dir=DIR" in status


def test_chat_says_what_it_sends_to_a_model_that_takes_text(published: ServerProcess, demo_engine: Path) -> None:
    whole = "".join(streamed_text(published.grpc, PROMPTS[0], max_tokens=12))
    done = llmserve("chat", "--url", published.grpc, "--once", PROMPTS[0], "--max-tokens", "12", "--seed", "1")
    assert (done.returncode, done.stdout.rstrip("\n")) == (0, whole.rstrip("\n")), done.stderr
    assert (
        f"takes text, not messages, and {demo_engine} marks roles with special tokens that have no text form"
        in done.stderr
    )


def test_a_stream_says_the_same_piece_by_piece(published: ServerProcess) -> None:
    """This postprocessing decodes each token by itself, and loses the spaces before words."""
    whole = "".join(streamed_text(published.grpc, PROMPTS[0], max_tokens=12, stream=False))
    pieces = streamed_text(published.grpc, PROMPTS[0], max_tokens=12)
    assert len(pieces) > 3
    assert "".join(pieces).replace(" ", "") == whole.replace(" ", "")


def test_word_lists_go_through_the_tokenizer_of_transformers(published: ServerProcess) -> None:
    """The published client asks for one answer in a stream, too."""
    whole = streamed_text(published.grpc, PROMPTS[0], max_tokens=12, stream=False)[-1]
    inputs = [one for one in client_inputs(PROMPTS[0], max_tokens=12, stream=False) if one.name() != "bad_words"]
    banned = tensor("bad_words", whole.split()[0].encode(), object)
    assert texts_of(published.grpc, [*inputs, banned]) != [whole]
