from __future__ import annotations

from pathlib import Path

import pytest

from llmserve.builder.options import BuildOptions
from llmserve.builder.recipe import Recipe, load_recipe
from llmserve.errors import NotFound, RecipeError

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


def test_every_problem_is_listed(tmp_path: Path) -> None:
    text = "max-batch-size: 8\nmax_seq_len: long\nmax_num_tokens: true\nbeams: 4\n1: 2\ndtype: [float16]\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    message = str(caught.value)
    assert "6 problems" in message
    assert "did you mean max_batch_size?" in message
    assert "max_seq_len must be a whole number, got 'long'" in message
    assert "max_num_tokens must be a whole number, got True" in message
    assert "unknown key 'beams'; keys are dtype, " in message
    assert "dtype must be text" in message


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "a: [", "\x00", "!!python/object:os.system {}"])
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="recipe"):
        load_recipe(write(tmp_path, text))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no recipe"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize("file", sorted((ROOT / "build/recipes").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_recipes_of_this_repository_name_a_checkpoint_that_is_here(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.checkpoint is not None
    assert (recipe.checkpoint / "config.json").is_file()
    assert recipe.resolve({}).problems() == []
