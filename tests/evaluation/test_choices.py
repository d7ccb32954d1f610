"""Multiple choice: what counts as right, the ids that are weighed, and both sides on a tiny network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmserve.core import TopTokens
from llmserve.engine.fake import FAKE_RUNNER_INFO, fake_engine, fake_prompt_log_prob
from llmserve.errors import InvalidArgument
from llmserve.evaluation.answers import Answer, Sample
from llmserve.evaluation.baseline.computed import compute_choices, kept_batches
from llmserve.evaluation.baseline.hf import HfModel
from llmserve.evaluation.baseline.stored import BaselineKey, load_baseline, this_environment
from llmserve.evaluation.candidates import EngineCandidate, choose_all
from llmserve.evaluation.choices import CHOICE_METRICS, score_choices
from llmserve.evaluation.decisions import Decision
from llmserve.evaluation.prompts import ChoicePrompt, PromptEncoder, ids_digest
from llmserve.stages.chat import Message
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import PreparedPrompt
from llmserve.stages.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint

INFO = replace(FAKE_RUNNER_INFO, vocab_size=512)
CHOICES = ("small red fox", "over the hill", "it")
TEXT = Sample("text", "The dog and the ", "it", CHOICES)
CHAT = Sample("chat", (Message("user", "Which one?"),), "over the hill", CHOICES)
KEY = BaselineKey("a" * 64, "e" * 64, "b" * 64, "float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("choices") / "tiny", "baichuan2-7b")


@pytest.fixture(scope="module")
def prompts(checkpoint: Path) -> list[ChoicePrompt]:
    return choice_prompts(PromptEncoder(checkpoint, 1).encode_samples([TEXT, CHAT]))


def choice_prompts(prompts: Sequence[PreparedPrompt]) -> list[ChoicePrompt]:
    found = [prompt for prompt in prompts if isinstance(prompt, ChoicePrompt)]
    assert len(found) == len(prompts)
    return found


def test_the_right_choice_plainly_and_by_length() -> None:
    """By characters the second is likeliest, by bytes the third: its characters take three each."""
    choices = ("ab", "abcdef", "文文文文")
    values = (-1.0, -1.2, -0.9)
    sample = Sample("s", "p", "文文文文", choices)
    found = score_choices(
        [sample, replace(sample, reference="abcdef")], [Answer("", 1, 1, 0.1, log_likelihoods=values)] * 2
    )
    assert tuple(found) == CHOICE_METRICS
    assert {name: value.tolist() for name, value in found.items()} == {
        "acc": [100.0, 0.0],
        "acc_norm": [0.0, 100.0],  # -0.5, -0.2, -0.225
        "acc_bytes": [100.0, 0.0],  # -0.5, -0.2, -0.075
    }


def test_the_first_of_equals_counts() -> None:
    answer = Answer("", 1, 1, 0.1, log_likelihoods=(-2.0, -2.0))
    found = score_choices([Sample("s", "p", "b", ("a", "b"))], [answer])
    assert found["acc"].tolist() == [0.0]


def test_a_text_goes_on_in_its_own_ids_and_its_last_space_is_the_choices(
    checkpoint: Path, prompts: list[ChoicePrompt]
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    begin = len(tokenizer.encode("The dog and the"))
    for choice, (before, ids) in zip(CHOICES, prompts[0].parts(), strict=True):
        whole = tuple(tokenizer.encode(f"The dog and the {choice}"))
        assert (before, ids) == (whole[:begin], whole[begin:])


def test_behind_messages_a_choice_has_ids_of_its_own(checkpoint: Path, prompts: list[ChoicePrompt]) -> None:
    tokenizer = load_tokenizer(checkpoint)
    asked = PromptEncoder(checkpoint, 1).encode(CHAT.prompt).input_ids
    assert prompts[1].parts() == [(asked, tuple(tokenizer.encode(choice))) for choice in CHOICES]


def test_other_choices_are_another_question(checkpoint: Path, prompts: list[ChoicePrompt]) -> None:
    encoder = PromptEncoder(checkpoint, 1)
    (other,) = encoder.encode_samples([replace(CHAT, choices=("over the hill", "it"))])
    assert ids_digest(other) != ids_digest(prompts[1])
    assert ids_digest(encoder.encode(CHAT.prompt)) not in {ids_digest(other), ids_digest(prompts[1])}


def test_choices_without_ids_of_their_own_are_named(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgument, match="sample chat: choice '' has no tokens of its own"):
        PromptEncoder(checkpoint, 1).encode_samples([replace(CHAT, choices=("it", ""))])


async def test_an_engine_weighs_every_choice(checkpoint: Path, prompts: list[ChoicePrompt]) -> None:
    progress = list[int]()
    engine = fake_engine(INFO)
    try:
        candidate = EngineCandidate(engine, PromptEncoder(checkpoint, 1), Postprocessor.open(checkpoint), 1)
        run = await choose_all(candidate, [TEXT, CHAT], prompts, concurrency=2, progress=progress.append)
    finally:
        engine.close()
    assert progress == [1, 1]
    for answer, prompt in zip(run.answers, prompts, strict=True):
        begin = len(prompt.input_ids)
        for found, ids in zip(answer.log_likelihoods, prompt.continued, strict=True):
            expected = sum(fake_prompt_log_prob(ids[:n], ids[n], 512) for n in range(begin, len(ids)))
            assert found == pytest.approx(expected, abs=1e-5)
        assert answer.text == CHOICES[int(np.argmax(answer.log_likelihoods))]
        assert answer.prompt_digest == ids_digest(prompt)
        assert answer.num_tokens == sum(len(ids) - begin for ids in prompt.continued)


class ShortEngine:
    """Has room for one token."""

    name = "short"

    async def answer(self, sample: Sample, request_id: str) -> Answer:
        raise AssertionError("nothing is written")

    async def decide(self, prompt: Sequence[int], tokens: Sequence[int], request_id: str) -> tuple[Decision, ...]:
        return tuple(Decision(token, -1.0, TopTokens((token,), (-1.0,))) for token in tokens[:1])


async def test_a_choice_that_has_no_room_is_no_choice(prompts: list[ChoicePrompt]) -> None:
    with pytest.raises(InvalidArgument, match=r"sample text: choice 0 has \d+ tokens, but only 1 fit"):
        await choose_all(ShortEngine(), [TEXT, CHAT], prompts, concurrency=1)


def test_the_baselines_numbers_are_the_networks_and_come_back(
    checkpoint: Path, prompts: list[ChoicePrompt], tmp_path: Path
) -> None:
    progress = list[int]()
    with kept_batches(tmp_path, KEY, this_environment(1)) as kept:
        computed = compute_choices(checkpoint, kept, prompts, progress=progress.append)
    assert progress == [1, 1]
    model = HfModel(checkpoint, "float32")
    answers = computed.select(prompts)
    assert answers is not None
    for answer, prompt in zip(answers, prompts, strict=True):
        begin = len(prompt.input_ids)
        for found, ids in zip(answer.log_likelihoods, prompt.continued, strict=True):
            logits = model.logits(ids).astype(np.float64)
            log_probs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
            expected = sum(log_probs[n - 1, ids[n]] for n in range(begin, len(ids)))
            assert found == pytest.approx(expected, abs=1e-4)
        assert answer.text == CHOICES[int(np.argmax(answer.log_likelihoods))]
    computed.save(tmp_path)
    stored = load_baseline(tmp_path, KEY)
    assert stored is not None
    loaded = stored.select(prompts)
    assert loaded == [replace(answer, seconds=round(answer.seconds, 4)) for answer in answers]
