"""Our torch Baichuan inside transformers: generation with a cache, left padding, saving, the cached NormHead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from llmserve.errors import CheckpointError
from llmserve.evaluation.baseline.baichuan_torch import BaichuanConfig, BaichuanForCausalLM, attention_bias, register
from tests.checkpoints import make_checkpoint
from tests.oracle import load_oracle

KINDS = ("baichuan2-7b", "baichuan2-13b", "baichuan1-7b")
SHORT, LONG = [5, 77, 130], [9, 250, 33, 41, 300, 12, 8]


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, with_tokenizer=False)


@pytest.fixture
def model(path: Path) -> Any:
    return load_oracle(path)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Without any cache: the whole sequence again for every token."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def generate(model: Any, **inputs: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt_length = inputs["input_ids"].shape[1]
    output: list[list[int]] = model.generate(**inputs, **settings)[:, prompt_length:].tolist()
    return output


def test_generate_with_cache_equals_argmax_without(model: Any) -> None:
    assert generate(model, input_ids=torch.tensor([LONG])) == [greedy(model, LONG, 12)]


def test_a_left_padded_batch_equals_each_prompt_alone(model: Any) -> None:
    padding = len(LONG) - len(SHORT)
    ids = torch.tensor([LONG, [0] * padding + SHORT])
    mask = torch.tensor([[1] * len(LONG), [0] * padding + [1] * len(SHORT)])
    assert generate(model, input_ids=ids, attention_mask=mask) == [greedy(model, LONG, 12), greedy(model, SHORT, 12)]


def test_left_padding_changes_no_logit_without_position_ids(model: Any) -> None:
    """Positions come from the mask when `generate` does not give them."""
    ids, mask = torch.tensor([[0, 0, *SHORT]]), torch.tensor([[0, 0, 1, 1, 1]])
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits[0, 2:]
        alone = model(torch.tensor([SHORT])).logits[0]
    assert torch.allclose(padded, alone, atol=1e-5)


def test_logits_to_keep(model: Any) -> None:
    with torch.no_grad():
        every = model(torch.tensor([LONG])).logits
        last = model(torch.tensor([LONG]), logits_to_keep=2).logits
    assert torch.allclose(every[:, -2:], last, atol=1e-5)


def test_saving_writes_the_resolved_form(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, BaichuanConfig)
    assert (config.position_embedding, config.norm_head) == (model.config.position_embedding, model.config.norm_head)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_half_precision_stays_close(path: Path, model: Any) -> None:
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = half(torch.tensor([LONG])).logits
        exact = model(torch.tensor([LONG])).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().max() < 0.05 * exact.abs().max()


FORM = {"position_embedding": "rope", "norm_head": True}  # too small to be told apart


def tiny_model(**overrides: Any) -> BaichuanForCausalLM:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    return BaichuanForCausalLM(BaichuanConfig(**(sizes | {"num_attention_heads": 2} | FORM | overrides)))


def test_norm_head_ignores_the_length_of_a_row_and_sees_new_weights() -> None:
    model = tiny_model(max_position_embeddings=16)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids).logits
        model.lm_head.weight.mul_(3.0)
        assert torch.allclose(model(ids).logits, before, atol=1e-6)
        model.lm_head.weight.neg_()
        assert torch.allclose(model(ids).logits, -before, atol=1e-6)


def test_norm_head_learns() -> None:
    model = tiny_model(max_position_embeddings=16)
    model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    gradient = model.lm_head.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def test_alibi_bias_by_hand() -> None:
    bias = attention_bias(torch.tensor([[0, 1, 1]]), 2, (0.5, 0.25))
    hidden = torch.finfo(torch.float16).min
    assert bias.tolist() == [
        [[[hidden, 0.0, hidden], [hidden, -0.5, 0.0]], [[hidden, 0.0, hidden], [hidden, -0.25, 0.0]]]
    ]


def test_a_contradictory_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match='add "position_embedding"'):
        BaichuanConfig(hidden_size=5120, num_attention_heads=40, max_position_embeddings=4096)


def test_register_twice() -> None:
    register()
    register()
    assert AutoConfig.for_model("baichuan", max_position_embeddings=16).position_embedding == "rope"
