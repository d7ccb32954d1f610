"""`llmserve build`: compiles a checkpoint into an engine directory, or prints the plan (`--dry-run`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llmserve.builder.build import build_engine, build_kernels
from llmserve.builder.options import BuildOptions, DeclaredOption, declared_options
from llmserve.builder.plan import plan_build
from llmserve.builder.prefix import Prefix, check_prefixes
from llmserve.builder.recipe import CONVERTED_FILE, Recipe, load_recipe
from llmserve.builder.resolve import longest_sequence
from llmserve.checkpoint.gguf.parts import model_name
from llmserve.checkpoint.name import checkpoint_name
from llmserve.checkpoint.reader import Checkpoint
from llmserve.cli.build_progress import shown_progress
from llmserve.cli.dataclass_command import DataclassCommand, argument, option
from llmserve.cli.facts_table import facts_table
from llmserve.cli.prefix import seal
from llmserve.cli.termination import terminated_as_exception
from llmserve.engine.directory.artifact import MANIFEST_FILE
from llmserve.engine.registry import runtime_for
from llmserve.errors import LlmserveError, RecipeError
from llmserve.models.number_formats import AUTO, BLOCKS, FLOATS, GGUF

OLD_INPUT_LEN = 1024  # build.py's default
GGUF_BYTES = "Q8_0"  # equals llmserve's int8


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The input of a build: a checkpoint, a recipe, or both."""

    checkpoint: Path | None = argument(None, "Hugging Face folder, or GGUF file.")
    checkpoint_dir: Path | None = option(
        None, "Other names for the checkpoint argument", "--checkpoint-dir", "--model-dir", "--hf-model-dir"
    )
    recipe: Path | None = option(None, "YAML file with these flags as keys; flags override it")

    def source(self) -> tuple[Path, Recipe]:
        """The checkpoint and the recipe. A folder of `llmserve convert-checkpoint` has both."""
        if self.checkpoint and self.checkpoint_dir and self.checkpoint != self.checkpoint_dir:
            raise RecipeError(
                f"two checkpoints: {self.checkpoint} and --checkpoint-dir {self.checkpoint_dir}; give one of them"
            )
        source = self.checkpoint or self.checkpoint_dir
        converted = source / CONVERTED_FILE if source and (source / CONVERTED_FILE).is_file() else None
        if self.recipe and converted:
            raise RecipeError(f"two recipes: --recipe {self.recipe} and {converted}; give one of them")
        recipe = load_recipe(file) if (file := self.recipe or converted) else Recipe()
        source = recipe.checkpoint if converted else source or recipe.checkpoint
        if source is None:
            raise RecipeError(
                "no checkpoint: give its folder or GGUF file as an argument, or as `checkpoint` in the recipe"
            )
        return source, recipe


@dataclass(frozen=True, kw_only=True)
class BuildCommandOptions(CheckpointOptions):
    """Options of the command that are not options of the build."""

    output_dir: Path | None = option(None, "Engine directory (default: engines/CHECKPOINT-DTYPE)")
    max_output_len: int | None = option(None, f"Longest answer, with --max-input-len ({OLD_INPUT_LEN})", min=1)
    dry_run: bool = option(False, "Print the plan and write nothing.", "--dry-run")
    kernels_only: Path | None = option(
        None, "Compile the kernels of --target cuda into a file for --kernels, from config.json alone."
    )
    prefix: list[Path] | None = option(
        None,
        "Precompute prefixes of prompts, as llmserve prefix does: messages in .json, otherwise text; repeatable.",
    )
    show_program: bool = option(False, "With --dry-run: print the Program.", "--show-program")


def build(asked: BuildCommandOptions) -> None:
    """Compile a checkpoint (Hugging Face's or GGUF) into an engine directory for this machine."""
    source, recipe = asked.source()
    options = _resolved(source, recipe, {name: getattr(asked, name) for name in declared_options()})
    if asked.max_output_len and not options.max_seq_len:
        longest = (options.given.get("max_input_len") or OLD_INPUT_LEN) + asked.max_output_len
        options = replace(options, max_seq_len=min(longest, longest_sequence(source)))
    if asked.kernels_only:
        if asked.dry_run or asked.output_dir:
            raise RecipeError("--kernels-only writes a file, not an engine; leave out --dry-run and --output-dir")
        _build_kernels(source, asked.kernels_only, options)
    elif asked.dry_run:
        _print_plan(source, options, show_program=asked.show_program)
    else:
        prefixes = [Prefix.read(path, is_chat=path.suffix == ".json") for path in asked.prefix or ()]
        output_dir = asked.output_dir or recipe.output_dir or default_output_dir(source, options)
        if prefixes:  # before the build, so that no engine is made if they are invalid
            check_prefixes(source, options, prefixes)
        _build(source, output_dir, options)
        if prefixes:
            seal(output_dir, prefixes)


def _resolved(source: Path, recipe: Recipe, flags: Mapping[str, Any]) -> BuildOptions:
    """The options. A GGUF file keeps its number formats, unless a flag sets one or the target does not support them."""
    options = recipe.resolve(flags)
    asked = {name for name, value in flags.items() if value is not None} | set(recipe.options or ())
    if options.quantization or "dtype" in asked or not options.own.keeps_blocks:
        return options
    try:
        with Checkpoint.open(source) as checkpoint:
            types = checkpoint.rounded_shares
    except LlmserveError:  # the build will report it
        return options
    return replace(options, quantization=GGUF.name) if types.keys() & {*BLOCKS, GGUF_BYTES} else options


def _typer_option(name: str, option: DeclaredOption) -> tuple[str, Any, None]:
    """The field of an option. It is None unless the flag is given, so that a recipe can set the option."""
    text, names = option.flag.help_with_choices, []
    if option.type is bool:
        names.append(f"--{name.replace('_', '-')}")  # without --no-...
    else:
        text += f" (default: {option.default if option.flag.default_text is None else option.flag.default_text})"
    panel = f"With --target {' or '.join(option.targets)}" if option.targets else None
    flag = typer.Option(*names, help=text, show_default=False, rich_help_panel=panel)
    return name, Annotated[option.type | None, flag], None


FLAGS = make_dataclass(
    "BuildFlags",
    [_typer_option(name, option) for name, option in declared_options().items()],
    frozen=True,
    kw_only=True,
)
command = DataclassCommand(  # the last base's flags come first
    make_dataclass("BuildCommandLine", (), bases=(BuildCommandOptions, FLAGS), frozen=True, kw_only=True), build
)


def default_output_dir(checkpoint: Path, options: BuildOptions) -> Path:
    """engines/<checkpoint>-<dtype>[-<quantization>][-drafting][-calibrated][-kvint8][-<what the target adds>]"""
    short = options.floats.short if options.dtype in FLOATS else options.dtype
    parts = (
        model_name(checkpoint_name(checkpoint)),
        short,
        options.quantization,
        "drafting" if options.drafting_layer else "",
        options.adapter.resolve().name if options.adapter else "",
        "calibrated" if options.calibration_data else "",
        "" if options.kv_cache_dtype == AUTO else f"kv{options.kv_cache_dtype}",
        *options.own.words_of_the_name(),
    )
    return Path("engines", "-".join(filter(None, parts)))


def _print_plan(checkpoint: Path, options: BuildOptions, *, show_program: bool) -> None:
    plan = plan_build(checkpoint, options)
    Console(highlight=False).print(facts_table(plan.rows()))
    if show_program:
        typer.echo(f"\n{plan.program}")


def _build_kernels(checkpoint: Path, output: Path, options: BuildOptions) -> None:
    with terminated_as_exception(), shown_progress() as progress:
        found = build_kernels(checkpoint, output, options, progress=progress)
    typer.echo(f"{output}: {found}, {output.stat().st_size / 2**20:.1f} MiB")


def built(checkpoint: Path) -> Path:
    """The engine of `llmserve build CHECKPOINT`. It is built if it does not exist."""
    options = _resolved(checkpoint, Recipe(), {})
    engine = default_output_dir(checkpoint, options)
    if not (engine / MANIFEST_FILE).is_file():
        _build(checkpoint, engine, options)
    return engine


def _build(checkpoint: Path, output_dir: Path, options: BuildOptions) -> None:
    with terminated_as_exception(), shown_progress() as progress:
        manifest = build_engine(checkpoint, output_dir, options, progress=progress)
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    typer.echo(f"{output_dir}: {manifest.source.architecture} {manifest.dtype}, {num_bytes / 2**20:.1f} MiB")
    if line := runtime_for(manifest.target).built_for(manifest):
        typer.echo(line)
    if manifest.loss:
        usual = options.weights.usual_loss
        advice = "" if manifest.loss.divergence <= usual else ": compare it with the checkpoint before you serve it"
        typer.echo(f"loss of rounding: {manifest.loss} of a short text")
        typer.echo(f"  up to {usual:g} nats are usual for {options.weights.name}{advice} (llmserve eval)")
    typer.echo(f"engine digest {manifest.engine_digest}")
