from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import quantized_params
from llmserve.builder.recipe import Recipe, load_recipe
from llmserve.builder.resolve import target_for
from llmserve.builder.targets.base import Network
from llmserve.errors import NotFound, RecipeError
from llmserve.models.registry import architecture_for

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str) -> Path:
    file = path / "recipe.yaml"
    file.write_text(text)
    return file


def test_flags_override_the_recipe_which_overrides_the_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "dtype: float32\nmax_batch_size: 3\n"))
    options = recipe.resolve({"dtype": "bfloat16", "max_batch_size": None, "max_seq_len": None})
    assert options == BuildOptions(dtype="bfloat16", max_batch_size=3)
    assert Recipe().resolve({"dtype": None}) == BuildOptions()


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "checkpoint: ../models/a\noutput_dir: /engines/a\n"))
    assert recipe.checkpoint == tmp_path / "../models/a"
    assert recipe.output_dir == Path("/engines/a")
    recipe = load_recipe(write(tmp_path, "quantization: int4\ncalibration_data: ../a.jsonl\n"))
    assert recipe.resolve({}).calibration_data == str(tmp_path / "../a.jsonl")
    assert recipe.resolve({"calibration_data": "b.jsonl"}).calibration_data == "b.jsonl"


def test_every_problem_is_listed(tmp_path: Path) -> None:
    text = "max-batch-size: 8\nmax_seq_len: long\nmax_num_tokens: true\nbeams: 4\n1: 2\ndtype: [float16]\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    message = str(caught.value)
    assert "6 problems" in message
    assert "did you mean max_batch_size?" in message
    assert "max_seq_len must be an integer, got 'long'" in message
    assert "max_num_tokens must be an integer, got True" in message
    assert "unknown key 'beams'; keys are dtype, " in message
    assert "dtype must be text" in message


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "a: [", "\x00", "!!python/object:os.system {}"])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="recipe"):
        load_recipe(write(tmp_path, text))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist"):
        load_recipe(tmp_path / "none.yaml")


DEMO = sorted((ROOT / "build/recipes").glob("*-docsum-*.yaml"))
PUBLISHED = sorted(set((ROOT / "build/recipes").glob("*.yaml")) - set(DEMO))
# config.json of the published checkpoints, as far as it decides what is built
BAICHUAN2 = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "hidden_act": "silu",
             "rms_norm_eps": 1e-6, "vocab_size": 125696, "model_max_length": 4096}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "baichuan2-7b": BAICHUAN2 | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                                 "num_attention_heads": 32, "max_position_embeddings": 4096},
    "baichuan2-13b": BAICHUAN2 | {"hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40,
                                  "num_attention_heads": 40},
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28, "tie_word_embeddings": False,
    },
}  # fmt: skip
NUM_PARAMETERS = {
    "baichuan2-7b": 7_505_973_248, "baichuan2-13b": 13_896_668_160, "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-7b": 7_615_616_512,
}  # fmt: skip


@pytest.mark.parametrize("file", DEMO, ids=lambda file: file.stem)
def test_the_recipes_of_the_demo_name_a_checkpoint_that_is_here(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.checkpoint is not None
    assert (recipe.checkpoint / "config.json").is_file()
    assert recipe.resolve({}).problems() == []


def test_each_published_model_has_its_recipes() -> None:
    both = ("baichuan2-7b-chat-fp16", "baichuan2-7b-chat-int8", "llama-3.1-8b", "qwen2.5-7b")
    names = {*both, *(f"{name}-cpu" for name in both), "baichuan2-13b-chat-tp2"}
    assert {file.stem for file in PUBLISHED} == names


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_the_recipes_of_published_models_can_be_built(file: Path) -> None:
    """From the published configuration: no weights are needed to know that options and network go together."""
    recipe = load_recipe(file)
    options = recipe.resolve({})
    assert recipe.checkpoint is None, "it is given on the command line"
    assert recipe.output_dir is not None
    assert recipe.output_dir.resolve() == ROOT / "engines" / file.stem
    assert options.target == ("cpu" if file.stem.endswith("-cpu") else "tensorrt_llm")
    name, config = next((name, config) for name, config in CONFIGS.items() if file.stem.startswith(name))
    architecture = architecture_for(config)
    spec = architecture.from_hf(config)
    params, program = architecture.params(spec), architecture.program(spec)
    assert sum(param.num_elements for param in params) == NUM_PARAMETERS[name]
    target = target_for(options.target, spec, config)
    assert options.max_seq_len <= spec.max_position_embeddings
    assert options.problems() == []
    assert target.problems(program, params, options) == []
    parts = quantized_params(program, params, options)
    itemsize = 1 if options.quantization == "int8" else 2
    expected = itemsize * NUM_PARAMETERS[name]
    assert expected <= target.engine_bytes(Network(program, params, options), parts) < 1.2 * expected
