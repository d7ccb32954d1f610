from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.plan import BuildPlan, _rate, plan_build
from llmserve.errors import RecipeError
from tests.builder.fake_target import FakeTarget
from tests.checkpoints import make_checkpoint

HIDDEN, INTER, VOCAB, LAYERS = 64, 176, 320, 2
KV_HEADS, HEAD_DIM = 2, 16
EMBEDDING = VOCAB * HIDDEN
LAYER = 2 * HIDDEN + (4 + 2 * KV_HEADS) * HEAD_DIM * HIDDEN + HIDDEN * HIDDEN + 3 * INTER * HIDDEN


def plan(checkpoint: Path, options: BuildOptions, memory_bytes: int = 2**40) -> BuildPlan:
    return plan_build(checkpoint, options, target=FakeTarget(memory_bytes=memory_bytes))


def test_the_numbers_are_those_on_paper(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    found = plan(checkpoint, BuildOptions(dtype="float16", tokens_per_block=32))
    assert found.num_parameters == 2 * EMBEDDING + LAYERS * LAYER + HIDDEN
    assert found.engine_bytes == 2 * found.num_parameters
    assert found.kv_bytes_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert found.weight_bytes_per_step == found.engine_bytes - 2 * EMBEDDING
    assert found.options.max_seq_len == 256
    read = found.weight_bytes_per_step + 100 * found.kv_bytes_per_token
    assert found.tokens_per_s_bound(100) == pytest.approx(1e9 / read)
    assert plan(checkpoint, BuildOptions(dtype="float32")).kv_bytes_per_token == 2 * found.kv_bytes_per_token


def test_a_tied_embedding_is_read_once_as_the_head(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama-tied")
    found = plan(checkpoint, BuildOptions())
    assert found.weight_bytes_per_step == found.engine_bytes == 2 * (EMBEDDING + LAYERS * LAYER + HIDDEN)
    quantized = plan(checkpoint, BuildOptions(quantization="int8"))  # a head of its own, beside the embedding
    assert quantized.weight_bytes_per_step == quantized.engine_bytes - 2 * EMBEDDING


def test_experts_that_a_token_does_not_choose_are_not_read(tmp_path: Path) -> None:
    found = plan(make_checkpoint(tmp_path / "tiny", "olmoe"), BuildOptions(dtype="float16"))
    idle = LAYERS * (7 - 3) * 3 * 48 * HIDDEN
    assert found.weight_bytes == found.engine_bytes - 2 * EMBEDDING
    assert found.weight_bytes_per_step == found.weight_bytes - 2 * idle


def test_sequences_take_whole_blocks_of_what_the_engine_leaves(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama", max_position_embeddings=1000)
    options = BuildOptions(dtype="float16", tokens_per_block=64)
    engine_bytes = plan(checkpoint, options).engine_bytes
    kv_bytes = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    found = plan(checkpoint, options, engine_bytes + 10240 * kv_bytes)
    assert found.kv_pool_tokens == 9216
    assert found.sequences_that_fit == {512: 18, 1000: 9}
    assert plan(checkpoint, options, 0).sequences_that_fit == {512: 0, 1000: 0}


def test_a_scaled_context_may_be_built_to_its_end(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen2", rope_scaling=scaling)
    assert plan(checkpoint, BuildOptions()).options.max_seq_len == 1024
    assert plan(checkpoint, BuildOptions(max_seq_len=1024)).options.max_seq_len == 1024
    with pytest.raises(RecipeError, match="max_seq_len is 1025, but the checkpoint was made for at most 1024"):
        plan(checkpoint, BuildOptions(max_seq_len=1025))


def test_settings_without_effect_are_reported(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama", with_tokenizer=False)
    notes = "\n".join(plan(checkpoint, BuildOptions(max_num_tokens=8)).notes)
    assert "max_batch_size=64 can never be reached" in notes
    assert "no tokenizer.json or tokenizer.model" in notes
    assert "tekken" not in notes
    (checkpoint / "tekken.json").write_text("{}")
    assert f"in Python, AutoTokenizer.from_pretrained('{checkpoint}')" in plan(checkpoint, BuildOptions()).notes[-1]
    with_tokenizer = make_checkpoint(tmp_path / "whole", "llama")
    assert plan(with_tokenizer, BuildOptions()).notes == ()


def test_it_refuses_what_a_build_would_refuse_and_writes_nothing(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "llama")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecipeError, match="power of two"):
        plan(checkpoint, BuildOptions(tokens_per_block=5))
    plan(checkpoint, BuildOptions())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("per_s", "text"), [(2453.4, "2,453"), (17.26, "17.3"), (2.345, "2.35")])
def test_a_rate_has_decimals_where_they_matter(per_s: float, text: str) -> None:
    assert _rate(per_s) == text
