"""`llmserve inspect`: describes an engine, and verifies it with `--verify`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llmserve.cli.facts_table import facts_table
from llmserve.cli.tactics_table import print_tactics
from llmserve.engine.directory.artifact import PROGRAM_FILE, EngineDirectory
from llmserve.engine.directory.build_time import BuildTime
from llmserve.engine.directory.gate_record import latest, records_of
from llmserve.engine.directory.manifest import Manifest
from llmserve.engine.directory.selftest import SelfTestResult
from llmserve.engine.directory.verify import verify_engine
from llmserve.engine.directory.vocabulary import tokenizer_digests
from llmserve.engine.registry import runtime_for
from llmserve.errors import EngineFileError, InvalidArgument, LlmserveError


def command(
    engine: Annotated[Path, typer.Argument(help="Engine directory.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file, and run the engine's self-test, if it has one.")
    ] = False,
    program: Annotated[bool, typer.Option("--program", help="Print the network that was compiled, op by op.")] = False,
    tactics: Annotated[bool, typer.Option("--tactics", help="Print the tactic of each linear layer, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Print what an engine directory holds; exit code 1 when its self-test fails, or cannot run here."""
    directory = EngineDirectory.open(engine)
    result, hindrance = _verified(directory) if verify else (None, "")
    if as_json:
        typer.echo(json.dumps(_as_json(directory, result, hindrance, is_verified=verify), indent=2))
    else:
        rows = _rows(directory, _verdict(directory, result, hindrance) if verify else "")
        Console(highlight=False).print(facts_table(rows))
    if tactics and not as_json:
        print_tactics(directory)
    if program:
        typer.echo("\n" + (directory.path / PROGRAM_FILE).read_text().rstrip())
    if hindrance or (result is not None and not result.passed):
        raise typer.Exit(1)


def _verified(directory: EngineDirectory) -> tuple[SelfTestResult | None, str]:
    """The self-test's result, or why it cannot run here although the files are unchanged."""
    try:
        return verify_engine(directory), ""
    except EngineFileError:
        raise
    except LlmserveError as error:
        return None, str(error)


def _verdict(directory: EngineDirectory, result: SelfTestResult | None, hindrance: str) -> str:
    """The verdict as text, after every file was hashed without an error."""
    if hindrance:
        return f"every file is unchanged; the self-test cannot run here: {hindrance}"
    if result is None:
        return f"every file is unchanged; engines for {directory.manifest.target} have no self-test"
    return f"every file is unchanged; {result}"


def _as_json(
    directory: EngineDirectory, result: SelfTestResult | None, hindrance: str, *, is_verified: bool
) -> dict[str, Any]:
    selftest = None if result is None else {**dataclasses.asdict(result), "passed": result.passed}
    manifest, runtime = json.loads(directory.manifest.to_json()), runtime_for(directory.manifest.target)
    layers = runtime.tactics(directory).layers
    tactics = {shape: [dataclasses.asdict(choice) for choice in choices] for shape, choices in layers.items()}
    build_time = BuildTime.load(directory.path)
    return {
        "manifest": manifest, "config": directory.config, "problems_here": runtime.problems_here(directory),
        "files_verified": is_verified, "selftest": selftest, "selftest_problem": hindrance or None, "tactics": tactics,
        "build_time": dataclasses.asdict(build_time) if build_time else None,
    }  # fmt: skip


def _rows(directory: EngineDirectory, verdict: str) -> list[tuple[str, str]]:
    manifest, info = directory.manifest, directory.info()
    size = sum(record.num_bytes for record in manifest.files.values())
    model = directory.config["pretrained_config"]
    problems = runtime_for(manifest.target).problems_here(directory)
    build_time = BuildTime.load(directory.path)
    rows = [
        ("engine", f"{info.name}, {size / 2**20:,.1f} MiB"),
        ("architecture", f"{info.architecture}, {model['num_hidden_layers']} layers of {model['hidden_size']}"
                         f"{', which drafts' if directory.only_drafts else ''}"),
        ("target", f"{info.target}, {info.dtype}"),
        ("device", _plain(manifest.device)),
        ("limits", f"{info.max_batch_size} sequences and {info.max_num_tokens:,} tokens per step, "
                   f"{info.max_seq_len:,} tokens per sequence"),
        ("vocabulary", f"{info.vocab_size:,}{_drafted(directory)}"),
        ("engine digest", manifest.engine_digest),
        *([("tokens' digest", "\n".join(tokens))] if (tokens := tokenizer_digests(directory).values()) else ()),
        ("checkpoint digest", manifest.source.digest),
        *([("checkpoint numbers", _rounded(manifest))] if manifest.source.rounded else ()),
        *([("calibrated with", str(manifest.calibration))] if manifest.calibration else ()),
        *([("loss of rounding", f"{manifest.loss} of a short text")] if manifest.loss else ()),
        ("built with", ", ".join(f"{name} {version}" for name, version in manifest.tools.items())),
        *([("built in", str(build_time))] if build_time else ()),
        ("files", ", ".join(manifest.files)),
        *([("sealed prefixes", ", ".join(manifest.prefixes))] if manifest.prefixes else ()),
        ("release gate", _records(directory)),
        ("runs here", "\n".join(f"no: {problem}" for problem in problems) or "yes"),
    ]  # fmt: skip
    return [*rows, ("verified", verdict)] if verdict else rows


def _records(directory: EngineDirectory) -> str:
    """The last complete record of each suite, a line each."""
    try:
        return "\n".join(map(str, latest(records_of(directory)).values())) or "no suite has a record for this engine"
    except InvalidArgument as error:
        return str(error)


def _plain(facts: Mapping[str, Any]) -> str:
    """The facts that fit a line; the rest is in the JSON form."""
    return ", ".join(f"{name} {value}" for name, value in facts.items() if not isinstance(value, dict))


def _drafted(directory: EngineDirectory) -> str:
    tokens = directory.draft_vocabulary
    return "" if tokens is None else f", of which it drafts {len(tokens):,}"


def _rounded(manifest: Manifest) -> str:
    """The number formats of a quantized checkpoint, and whether they were kept."""
    num_kept = manifest.device.get("kept_params", 0)
    taken = f"kept in {num_kept} weights, elsewhere expanded" if num_kept else "expanded"
    return f"{manifest.source.rounded}, {taken}"
