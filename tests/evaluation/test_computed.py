"""What the Hugging Face model says of a tiny network, all at once and after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.baseline.computed import compute_baseline, compute_choices, kept_batches, with_rounding
from llmserve.evaluation.baseline.hf import HfAnswer, HfModel
from llmserve.evaluation.baseline.stored import Baseline, BaselineKey, this_environment
from llmserve.evaluation.prompts import ChoicePrompt, PromptEncoder, ids_digest
from llmserve.stages.chat import Message
from llmserve.stages.preprocess import PreparedPrompt
from tests.checkpoints import make_checkpoint

KEY = BaselineKey("a" * 64, "e" * 64, "b" * 64, "float32")
TEXTS = ("one", "two words", "and three words", "four", "five of them", "six")
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("computed") / "tiny", "baichuan2-7b")


@pytest.fixture(scope="module")
def prompts(checkpoint: Path) -> list[PreparedPrompt]:
    encoder = PromptEncoder(checkpoint, MAX_TOKENS)
    return [encoder.encode((Message("user", text),)) for text in TEXTS]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """Every batch that the model is asked, as ids."""
    batches = list[tuple[tuple[int, ...], ...]]()
    generate = HfModel.generate

    def counted(model: HfModel, ids: Sequence[Sequence[int]], **options: Any) -> list[HfAnswer]:
        batches.append(tuple(tuple(one) for one in ids))
        return generate(model, ids, **options)

    monkeypatch.setattr(HfModel, "generate", counted)
    return batches


def interrupting(after: int) -> Callable[[int], None]:
    """Ctrl-C when so many are done."""
    done = 0

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done >= after:
            raise KeyboardInterrupt

    return progress


def untimed(baseline: Baseline) -> dict[str, Answer]:
    return {digest: replace(answer, seconds=0.0) for digest, answer in baseline.answers.items()}


class Computing:
    """The baseline of one checkpoint, computed in one folder."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint = checkpoint
        self._folder = folder

    @property
    def partial(self) -> Path:
        return self._folder / f"{KEY.file_name}.partial"

    def compute(
        self,
        prompts: Sequence[PreparedPrompt],
        batch_size: int = 1,
        key: BaselineKey = KEY,
        progress: Callable[[int], None] = lambda count: None,
        **environment: str,
    ) -> Baseline:
        with kept_batches(self._folder, key, this_environment(batch_size) | environment) as kept:
            return compute_baseline(self._checkpoint, kept, prompts, max_tokens=MAX_TOKENS, progress=progress)

    def interrupt(self, prompts: Sequence[PreparedPrompt], after: int, batch_size: int = 1) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.compute(prompts, batch_size, progress=interrupting(after))


@pytest.fixture
def computing(checkpoint: Path, tmp_path: Path) -> Computing:
    return Computing(checkpoint, tmp_path / "baselines")


def test_both_dtypes_read_the_same_answers(
    computing: Computing, checkpoint: Path, prompts: list[PreparedPrompt]
) -> None:
    baseline = computing.compute(prompts)
    model = HfModel(checkpoint, KEY.dtype)
    told = with_rounding(checkpoint, baseline, prompts)
    for prompt in prompts:
        answer = told.answers[ids_digest(prompt)]
        again = model.decide(prompt.input_ids, [decision.token for decision in answer.decisions])
        assert [one.token for one in again] == [one.token for one in answer.decisions]
        assert [one.log_prob for one in again] == pytest.approx([one.log_prob for one in answer.decisions], abs=1e-4)
        assert len(answer.rounding) == len(answer.decisions)
        assert 0 < max(answer.rounding) < 0.01
        assert replace(answer, rounding=()) == baseline.answers[ids_digest(prompt)]


def test_computed_answers(computing: Computing, prompts: list[PreparedPrompt], tmp_path: Path) -> None:
    done: list[int] = []
    computed = computing.compute(prompts[:3], 2, progress=done.append)
    answers = computed.select(prompts[:3])
    assert answers is not None
    assert done == [2, 1]
    assert [answer.num_prompt_tokens for answer in answers] == [len(prompt.input_ids) for prompt in prompts[:3]]
    assert [answer.prompt_digest for answer in answers] == [ids_digest(prompt) for prompt in prompts[:3]]
    assert all(0 < answer.num_tokens == len(answer.token_ids or ()) <= MAX_TOKENS for answer in answers)
    assert computed.environment["batch_size"] == "2"
    assert computed.environment["torch"]
    path = computed.save(tmp_path)
    assert len(path.read_text().splitlines()) < 30  # one line per answer
    assert json.loads(path.read_text())["dtype"] == "float32"


@pytest.mark.parametrize(("batch_size", "after"), [(1, 1), (1, 4), (1, 6), (2, 2), (4, 4)])
def test_an_interrupted_baseline_goes_on_where_it_stopped(
    computing: Computing,
    checkpoint: Path,
    prompts: list[PreparedPrompt],
    asked: list[tuple[tuple[int, ...], ...]],
    tmp_path: Path,
    batch_size: int,
    after: int,
) -> None:
    whole = Computing(checkpoint, tmp_path / "whole").compute(prompts, batch_size)
    everything, asked[:] = tuple(asked), []
    computing.interrupt(prompts, after, batch_size)
    before, asked[:] = tuple(asked), []
    done = list[int]()
    again = computing.compute(prompts, batch_size, progress=done.append)
    warm_up = everything[:1]
    assert (*warm_up, *before[1:], *asked[1:]) == everything
    assert len(before) - 1 == after // batch_size
    assert sum(done) == len(prompts)
    assert untimed(again) == untimed(whole)
    assert again.environment == whole.environment


def test_a_batch_of_other_prompts_is_asked_as_a_whole(
    computing: Computing, prompts: list[PreparedPrompt], asked: list[tuple[tuple[int, ...], ...]]
) -> None:
    """The padding of a batch is in its numbers: an answer counts among the same others only."""
    computing.interrupt(prompts, 4, 2)
    asked.clear()
    computing.compute([*prompts[:2], *prompts[3:5]], 2)
    assert asked[1:] == [tuple(prompt.input_ids for prompt in prompts[3:5])]


@pytest.mark.parametrize(
    "changes", [{"machine": "another"}, {"torch": "0.1"}, {"key": replace(KEY, suite_digest="b" * 16 + "c" * 48)}]
)
def test_another_environment_or_key_begins_anew(
    computing: Computing,
    prompts: list[PreparedPrompt],
    asked: list[tuple[tuple[int, ...], ...]],
    changes: dict[str, Any],
) -> None:
    computing.interrupt(prompts, 4)
    asked.clear()
    computing.compute(prompts, **changes)
    assert len(asked) == 1 + len(prompts)


def test_another_batch_size_begins_anew(
    computing: Computing, prompts: list[PreparedPrompt], asked: list[tuple[tuple[int, ...], ...]]
) -> None:
    computing.interrupt(prompts, 4)
    asked.clear()
    computing.compute(prompts, 2)
    assert len(asked) == 1 + len(prompts) / 2


@pytest.mark.parametrize("damage", [b'{"batch": [["', b"\x00\xff\n", b'{"batch": [["ab", {}]]}\n', b"5\n"])
def test_whole_lines_of_a_damaged_file_count(
    computing: Computing, prompts: list[PreparedPrompt], asked: list[tuple[tuple[int, ...], ...]], damage: bytes
) -> None:
    computing.interrupt(prompts, 4)
    computing.partial.write_bytes(computing.partial.read_bytes() + damage)
    asked.clear()
    computing.compute(prompts)
    assert len(asked) == 1 + 2
    asked.clear()
    computing.compute(prompts)  # and what was asked then is kept behind them
    assert len(asked) == 1


def test_two_runs_do_not_mix(tmp_path: Path) -> None:
    environment = this_environment(1)
    with ExitStack() as stack:
        first = stack.enter_context(kept_batches(tmp_path, KEY, environment))
        with pytest.raises(InvalidArgument, match="wait until it ends"):
            stack.enter_context(kept_batches(tmp_path, KEY, environment))
        stack.enter_context(kept_batches(tmp_path, replace(KEY, dtype="float16"), environment))
        first.remove()
        stack.enter_context(kept_batches(tmp_path, KEY, environment))  # of the run that comes after it
        assert (tmp_path / f"{KEY.file_name}.partial").exists()
    with pytest.raises(InvalidArgument, match="cannot be written"), kept_batches(Path("/proc/x"), KEY, environment):
        pass


def test_interrupted_choices_go_on_where_they_stopped(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [Sample(text, text, "it", ("it", "over the hill")) for text in TEXTS]
    encoded = PromptEncoder(checkpoint, 1).encode_samples(samples)
    prompts = [prompt for prompt in encoded if isinstance(prompt, ChoicePrompt)]
    asked = list[int]()
    log_likelihoods = HfModel.log_likelihoods

    def counted(model: HfModel, continued: Sequence[Sequence[int]], begin: int) -> list[float]:
        asked.append(begin)
        return log_likelihoods(model, continued, begin)

    monkeypatch.setattr(HfModel, "log_likelihoods", counted)
    with kept_batches(tmp_path / "whole", KEY, this_environment(1)) as kept:
        whole = compute_choices(checkpoint, kept, prompts)
    asked.clear()
    with kept_batches(tmp_path, KEY, this_environment(1)) as kept, pytest.raises(KeyboardInterrupt):
        compute_choices(checkpoint, kept, prompts, progress=interrupting(4))
    with kept_batches(tmp_path, KEY, this_environment(1)) as kept:
        again = compute_choices(checkpoint, kept, prompts)
    assert len(asked) == 1 + 4 + 1 + 2
    assert untimed(again) == untimed(whole)
