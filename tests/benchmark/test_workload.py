"""The requests of a load: lengths that hold, prefixes that are shared, prompts of files."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from llmserve.benchmark.calibration import asked_writer, counted_writer
from llmserve.benchmark.lengths import Fixed, Uniform
from llmserve.benchmark.records import LoadRequest, Record
from llmserve.benchmark.workload import Given, Synthetic, Writer, read_prompts
from llmserve.errors import InvalidArgument
from llmserve.stages.tokenizer import load_tokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "build/checkpoints/baichuan2-tiny-docsum"


def first(workload: Synthetic | Given, count: int, seed: int = 0) -> list[LoadRequest]:
    return list(islice(workload.requests(np.random.default_rng(seed)), count))


def test_with_a_tokenizer_prompts_have_exactly_the_wanted_tokens() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    writer = counted_writer(lambda text: len(tokenizer.encode(text)))
    for length in (5, 17, 64, 300):
        made = first(Synthetic(writer, Fixed(length), Fixed(7)), 20)
        assert {len(tokenizer.encode(str(request.prompt))) for request in made} == {length}
        assert {request.max_tokens for request in made} == {7}


class CountingServer:
    """Every letter is a token, and the chat format adds ten."""

    def __init__(self, *, counts: bool = True, most: int = 10**6) -> None:
        self.counts, self.most = counts, most

    async def ask(self, request: LoadRequest, record: Record) -> None:
        record.arrived.append(1.0)
        assert request.max_tokens == 1
        if self.counts:
            record.prompt_tokens = min(10 + len(str(request.prompt).replace(" ", "")), self.most)

    async def close(self) -> None: ...


async def test_a_server_says_how_long_words_are() -> None:
    found = await asked_writer(CountingServer())
    assert (found.failed, found.note) == (None, "")
    prompts = first(Synthetic(found.writer, Fixed(2000), Fixed(1)), 20)
    lengths = [len(str(request.prompt).replace(" ", "")) for request in prompts]
    assert np.mean(lengths) == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    ("server", "words"),
    [(CountingServer(counts=False), "does not count tokens"), (CountingServer(most=100), "cuts prompts")],
)
async def test_a_server_that_does_not_say_it_is_guessed(server: CountingServer, words: str) -> None:
    found = await asked_writer(server)
    assert words in found.note
    assert found.writer.tokens_per_word == 1.3


def test_prompts_share_their_prefixes_and_nothing_else() -> None:
    made = first(Synthetic(Writer(1.0), Fixed(30), Fixed(1), prefix_tokens=50, num_prefixes=3), 100)
    words = [str(request.prompt).split() for request in made]
    assert {len(each) for each in words} == {80}
    assert len({tuple(each[:50]) for each in words}) == 3
    assert len({tuple(each[50:]) for each in words}) == 100


def test_the_same_seed_makes_the_same_prompts() -> None:
    workload = Synthetic(Writer(1.0), Uniform(5, 50), Uniform(5, 50))
    assert first(workload, 20) == first(workload, 20) != first(workload, 20, seed=1)


def test_prompts_of_files_in_their_order_again_and_again(tmp_path: Path) -> None:
    text, lines = tmp_path / "x.txt", tmp_path / "x.jsonl"
    text.write_text("one\n\ntwo\n")
    talk = [{"role": "user", "content": "hello"}]
    lines.write_text(f"{json.dumps({'prompt': 'one', 'max_tokens': 5})}\n{json.dumps({'messages': talk})}\n")
    assert first(Given(read_prompts(text), Fixed(9)), 3) == [
        LoadRequest("one", 9), LoadRequest("two", 9), LoadRequest("one", 9),
    ]  # fmt: skip
    assert first(Given(read_prompts(lines), Fixed(9)), 2) == [LoadRequest("one", 5), LoadRequest(talk, 9)]


def test_everything_that_is_wrong_with_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    wrong = ["{", "[]", "{}", '{"prompt": "x", "messages": []}', '{"prompt": 5}', '{"prompt": "x", "max_tokens": 0}']
    path.write_text("\n".join(['{"prompt": "fine"}', *wrong, '{"prompt": "x", "size": 1}', '{"messages": [{}]}']))
    with pytest.raises(InvalidArgument) as caught:
        read_prompts(path)
    for number in (2, 3, 4, 5, 6):
        assert f"line {number}:" in str(caught.value)
    assert "and 3 more" in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_prompts(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"x\.txt"):
        read_prompts(tmp_path / "x.txt")
