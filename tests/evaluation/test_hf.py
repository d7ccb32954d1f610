"""The Hugging Face side on a tiny random checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmserve.errors import CheckpointError, Unsupported
from llmserve.evaluation.baseline import hf
from llmserve.evaluation.decisions import NUM_TOP
from tests.checkpoints import make_checkpoint

NORM = "model.layers.1.input_layernorm.weight"
PROMPTS = [[195, 30, 31, 32, 33, 34, 196], [195, 40, 196], [195, 50, 51, 52, 196]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hf"), "baichuan2-7b")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> hf.HfModel:
    return hf.HfModel(checkpoint, "float32")


def ask(model: hf.HfModel, prompts: list[list[int]], end_ids: tuple[int, ...] = (2,)) -> list[hf.HfAnswer]:
    return model.generate(prompts, max_tokens=6, end_ids=end_ids, pad_id=0)


def test_answers_are_greedy(model: hf.HfModel) -> None:
    (answer,) = ask(model, PROMPTS[:1])
    ids = list(PROMPTS[0])
    for token, decision in zip(answer.token_ids, answer.decisions, strict=True):
        logits = np.sort(model.logits(ids)[-1])
        assert token == int(model.logits(ids)[-1].argmax())
        assert decision.margin == pytest.approx(logits[-1] - logits[-2], abs=1e-4)
        log_probs = model.logits(ids)[-1] - np.logaddexp.reduce(model.logits(ids)[-1])
        assert decision.token == token
        assert decision.log_prob == pytest.approx(log_probs[token], abs=1e-4)
        assert decision.top.log_probs == pytest.approx(np.sort(log_probs)[: -NUM_TOP - 1 : -1], abs=1e-4)
        assert log_probs[list(decision.top.ids)] == pytest.approx(decision.top.log_probs, abs=1e-4)
        ids.append(token)
    assert answer.seconds > 0


def test_a_left_padded_batch_answers_as_each_alone(model: hf.HfModel) -> None:
    alone = [ask(model, [prompt])[0].token_ids for prompt in PROMPTS]
    assert [answer.token_ids for answer in ask(model, PROMPTS)] == alone


def test_an_end_token_ends_the_answer_and_is_not_part_of_it(model: hf.HfModel) -> None:
    full = ask(model, PROMPTS[:1])[0]
    end = full.token_ids[3]
    cut = full.token_ids.index(end)
    (answer,) = ask(model, PROMPTS[:1], (9, end))
    assert answer.token_ids == full.token_ids[:cut]
    assert [decision.token for decision in answer.decisions] == [*full.token_ids[:cut], end]


def test_sampling_defaults_of_the_checkpoint_do_not_leak(checkpoint: Path, model: hf.HfModel, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "baichuan2-7b")
    sampling = {"do_sample": True, "temperature": 5.0, "top_k": 50, "repetition_penalty": 9.0, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(sampling))
    other = hf.HfModel(tmp_path, "float32")
    assert [a.token_ids for a in ask(other, PROMPTS[:1])] == [a.token_ids for a in ask(model, PROMPTS[:1])]


def test_remote_code_is_not_executed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {n: f"evil.{n}" for n in ("AutoConfig", "AutoModelForCausalLM")}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        hf.HfModel(tmp_path, "float32")
    assert not (tmp_path / "ran").exists()


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
        (lambda t: t.update({"model.extra.bias": t[NORM]}), "tensor model.extra.bias is not used by the network"),
        (lambda t: t.update({NORM: t[NORM][:3]}), f"tensor {NORM} does not have the shape that the network expects"),
    ],
    ids=["missing", "unexpected", "mismatched"],
)
def test_a_baseline_of_other_weights_is_refused(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    """transformers by itself only warns, and goes on with random numbers."""
    change_tensors(make_checkpoint(tmp_path, "baichuan2-7b"), change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        hf.HfModel(tmp_path, "float32")


@pytest.mark.parametrize("kind", ["baichuan2-7b", "llama"])
def test_stored_rotary_frequencies_do_no_harm(tmp_path: Path, kind: str) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(make_checkpoint(tmp_path, kind), lambda t: t.update({name: np.ones(8, np.float32)}))
    assert ask(hf.HfModel(tmp_path, "float32"), PROMPTS[:1])


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    assert ask(hf.HfModel(make_checkpoint(tmp_path, "llama-tied"), "float32"), PROMPTS[:1])


def test_without_torch_it_says_what_to_install(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "is_available", lambda: False)
    with pytest.raises(Unsupported, match=r"pip install 'llmserve\[baseline\]'"):
        hf.HfModel(checkpoint, "float32")
