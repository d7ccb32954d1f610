"""`llmserve build`: compile a checkpoint into an engine directory, or say what that would make (`--dry-run`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from llmserve.builder.build import build_engine
from llmserve.builder.options import DTYPES, TENSORRT_LLM, BuildOptions
from llmserve.builder.plan import plan_build
from llmserve.builder.recipe import OPTION_TYPES, Recipe, load_recipe
from llmserve.builder.targets.tensorrt_llm.options import CHOICES
from llmserve.cli.facts_table import facts_table
from llmserve.engine.manifest import Manifest
from llmserve.errors import RecipeError

SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
DEFAULTS = BuildOptions()
GPU = DEFAULTS.tensorrt_llm
GPU_PANEL = "With --target tensorrt_llm"
# trtllm-build's flags have underscores
CONTEXT_SETTINGS = {"token_normalize_func": lambda name: name.replace("_", "-")}


def _flag(text: str, default: object = None, *, panel: str | None = None) -> typer.models.OptionInfo:
    """An option that is None unless given, so that a recipe can speak first."""
    option: typer.models.OptionInfo = typer.Option(
        help=text if default is None else f"{text} (default: {default})", show_default=False, rich_help_panel=panel
    )
    return option


def _gpu_flag(name: str, text: str) -> typer.models.OptionInfo:
    """A flag of trtllm-build, under the name and with the values that it has there."""
    choices = " | ".join(CHOICES.get(name, ()))
    return _flag(f"{text}: {choices}" if choices else text, getattr(GPU, name), panel=GPU_PANEL)


def _gpu_switch(name: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{name.replace('_', '-')}", help=text, show_default=False, rich_help_panel=GPU_PANEL
    )
    return option


def command(
    context: typer.Context,
    checkpoint: Annotated[Path | None, typer.Argument(help="Hugging Face folder.", show_default=False)] = None,
    dtype: Annotated[str | None, _flag(" | ".join(DTYPES), DEFAULTS.dtype)] = None,
    quantization: Annotated[str | None, _flag("int8 | int4: weights; activations become int8", "none")] = None,
    group_size: Annotated[int | None, _flag("Inputs that share an int4 scale: 32 | 64 | 128", 64)] = None,
    kv_cache_dtype: Annotated[str | None, _flag("auto (as dtype) | int8", DEFAULTS.kv_cache_dtype)] = None,
    output_dir: Annotated[Path | None, _flag("Engine directory", "engines/CHECKPOINT-DTYPE")] = None,
    max_batch_size: Annotated[int | None, _flag("Sequences in one step", DEFAULTS.max_batch_size)] = None,
    max_num_tokens: Annotated[int | None, _flag("Tokens in one step", DEFAULTS.max_num_tokens)] = None,
    max_seq_len: Annotated[int | None, _flag("Prompt and output of one sequence", "the checkpoint's limit")] = None,
    tokens_per_block: Annotated[int | None, _flag("KV block size", DEFAULTS.tokens_per_block)] = None,
    target: Annotated[str | None, _flag("Device to compile for: cpu | tensorrt_llm", DEFAULTS.target)] = None,
    tp_size: Annotated[int | None, _gpu_flag("tp_size", "GPUs that share each layer")] = None,
    pp_size: Annotated[int | None, _gpu_flag("pp_size", "GPUs that share the layers among them")] = None,
    max_input_len: Annotated[int | None, _gpu_flag("max_input_len", "Longest prompt; 0: max_seq_len less 1")] = None,
    max_beam_width: Annotated[int | None, _gpu_flag("max_beam_width", "Beams of one request")] = None,
    gemm_plugin: Annotated[str | None, _gpu_flag("gemm_plugin", "Matrix products")] = None,
    gpt_attention_plugin: Annotated[str | None, _gpu_flag("gpt_attention_plugin", "Attention")] = None,
    context_fmha: Annotated[str | None, _gpu_flag("context_fmha", "Fused attention over prompts")] = None,
    remove_input_padding: Annotated[str | None, _gpu_flag("remove_input_padding", "Packed prompts")] = None,
    kv_cache_type: Annotated[str | None, _gpu_flag("kv_cache_type", "KV cache")] = None,
    use_weight_only: Annotated[bool | None, _gpu_switch("use_weight_only", "Quantize weights only.")] = None,
    weight_only_precision: Annotated[str | None, _gpu_flag("weight_only_precision", "Of those weights")] = None,
    multiple_profiles: Annotated[str | None, _gpu_flag("multiple_profiles", "Several optimization profiles")] = None,
    reduce_fusion: Annotated[str | None, _gpu_flag("reduce_fusion", "Sum and norm in one kernel")] = None,
    workers: Annotated[int | None, _gpu_flag("workers", "Ranks that are built at once")] = None,
    parallel_build: Annotated[bool | None, _gpu_switch("parallel_build", "As many workers as GPUs.")] = None,
    recipe: Annotated[Path | None, _flag("YAML file with these flags as keys; flags override it")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    show_program: Annotated[bool, typer.Option("--show-program", help="With --dry-run: print the Program.")] = False,
) -> None:
    """Compile a Hugging Face checkpoint into an engine directory for this machine."""
    wanted = load_recipe(recipe) if recipe else Recipe()
    options = wanted.resolve({name: context.params[name] for name in OPTION_TYPES})
    source = checkpoint or wanted.checkpoint
    if source is None:
        raise RecipeError("no checkpoint: give its folder as an argument, or as `checkpoint` in the recipe")
    if dry_run:
        _print_plan(source, options, show_program=show_program)
    else:
        _build(source, output_dir or wanted.output_dir or default_output_dir(source, options), options)


def default_output_dir(checkpoint: Path, options: BuildOptions) -> Path:
    """engines/<checkpoint>-<dtype>[-<quantization>][-kvint8][-tensorrt_llm][-tp<size>]"""
    short = SHORT_DTYPES.get(options.dtype, options.dtype)
    cache = "" if options.kv_cache_dtype == "auto" else f"kv{options.kv_cache_dtype}"
    device = options.target if options.target == TENSORRT_LLM else ""
    ranks = f"tp{options.tensorrt_llm.tp_size}" if options.tensorrt_llm.tp_size > 1 else ""
    parts = (checkpoint.resolve().name, short, options.quantization, cache, device, ranks)
    return Path("engines", "-".join(filter(None, parts)))


def _print_plan(checkpoint: Path, options: BuildOptions, *, show_program: bool) -> None:
    plan = plan_build(checkpoint, options)
    Console(highlight=False).print(facts_table(plan.rows()))
    if show_program:
        typer.echo(f"\n{plan.program}")


def _build(checkpoint: Path, output_dir: Path, options: BuildOptions) -> None:
    with _terminated_as_exception(), _ProgressBar() as bar:
        manifest = build_engine(checkpoint, output_dir, options, progress=bar)
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    typer.echo(f"{output_dir}: {manifest.source.architecture} {manifest.dtype}, {num_bytes / 2**20:.1f} MiB")
    if manifest.target == TENSORRT_LLM:
        typer.echo(_gpu_line(manifest))
    typer.echo(f"engine digest {manifest.engine_digest}")


def _gpu_line(manifest: Manifest) -> str:
    """Which mode built it, and for what."""
    device = manifest.device
    return (
        f"tensorrt-llm {device['tensorrt_llm']}, {device['mode']} mode, for {device['world_size']} x {device['gpu']} "
        f"(compute capability {device['compute_capability']})"
    )


@contextmanager
def _terminated_as_exception() -> Iterator[None]:
    """Within, SIGTERM unwinds the stack as Ctrl-C does, so that nothing half-built is left."""

    def terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _ProgressBar:
    """The builder's `Progress`, drawn on the terminal (standard error); one line per phase."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<20}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[what]}"), console=Console(stderr=True))
        self._task: TaskID | None = None

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._task is None:
            return  # refused before the first phase: nothing was drawn
        if error[0] is None:
            self._finish_phase()
        self._bar.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        self._bar.start()
        self._finish_phase()
        self._task = self._bar.add_task(name, total=total_bytes, what="")

    def advance(self, what: str, num_bytes: int) -> None:
        assert self._task is not None
        self._bar.update(self._task, advance=num_bytes, what=what)

    def _finish_phase(self) -> None:
        if self._task is not None:
            done = self._bar.tasks[self._task].completed
            self._bar.update(self._task, total=max(done, 1), completed=max(done, 1), what="")
