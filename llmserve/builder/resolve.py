"""Everything about a build that is known before a weight is read; all problems in one report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from llmserve.builder.blocks import stored_parts
from llmserve.builder.calibration.encoder import Encoder, Ids
from llmserve.builder.calibration.text import CalibrationText, read_calibration
from llmserve.builder.draft_vocabulary import tokens_of, with_draft_vocabulary
from llmserve.builder.loss import passage_ids
from llmserve.builder.options import BuildOptions
from llmserve.builder.quantization import (
    WeightPart,
    keeps_integers,
    num_matrices,
    quantized_params,
    rounded_tables,
    stored_names,
)
from llmserve.builder.targets.base import Network, Target
from llmserve.builder.targets.registry import TARGETS
from llmserve.checkpoint.plan import WeightPlan, named_as_stored, plan_weights
from llmserve.checkpoint.reader import Checkpoint, read_config
from llmserve.checkpoint.sentence_transformers import prompt_notes, read_pooling
from llmserve.errors import CheckpointError, RecipeError, Unsupported, raise_problems
from llmserve.models.graph import OpKind, Program
from llmserve.models.number_formats import FLOAT32, ROUNDED
from llmserve.models.registry import AnyArchitecture, architecture_for
from llmserve.models.spec import DecoderSpec, HfConfig, Param, Pooling
from llmserve.stages.tokenizer_code import TokenizerCode, find_tokenizer_code


@dataclass(frozen=True, slots=True)
class ResolvedBuild:
    spec: DecoderSpec
    params: Sequence[Param]
    program: Program
    options: BuildOptions  # max_seq_len resolved, never 0
    target: Target
    weights: WeightPlan
    tokenizer_code: TokenizerCode
    quantized: Mapping[str, Sequence[WeightPart]]  # by parameter
    kept: Sequence[str]  # of these, those whose integers the checkpoint has
    encoder: Encoder
    calibration: CalibrationText | None = None
    checkpoint_notes: Sequence[str] = ()
    prompt_notes: Sequence[str] = ()

    @property
    def engine_bytes(self) -> int:
        return self.target.engine_bytes(Network(self.program, self.params, self.options), self.quantized)

    def kept_as(self, name: str) -> str:
        """Formats of a parameter's rows in the file if they are kept as blocks, for the digest."""
        stored = [part.scheme.format.name for part in self.quantized[name] if part.scheme.is_stored]
        return " ".join(stored) or "kept"

    @property
    def looked_up(self) -> set[str]:
        """Quantized matrices whose rows are looked up: embeddings, and heads tied to them."""
        stored = stored_names(self.params, self.quantized)
        tables = {stored[op.weights[0]] for op in self.program.ops if op.kind is OpKind.EMBED}
        return {name for name in self.quantized if stored[name] in tables}

    @property
    def is_rounded(self) -> bool:
        """Whether weights, or keys and values, are rounded."""
        return bool(self.quantized) or self.target.cache_format(self.options).is_rounded

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in the engine's dtype, before quantization."""
        return self.options.floats.num_bytes(sum(param.num_elements for param in self.params))

    @property
    def hashed_bytes(self) -> int:
        """As `weight_bytes`, but with float32 for parameters that keep the checkpoint's integers."""
        kept = sum(param.num_elements for param in self.params if param.name in self.kept)
        return self.weight_bytes + FLOAT32.num_bytes(kept) - self.options.floats.num_bytes(kept)

    @property
    def passage(self) -> Ids:
        """The passage on which the loss of rounding is measured; empty if no weight is rounded or there is no
        tokenizer."""
        is_measured = self.options.quantization and not (self.program.pools or self.program.hidden_width)
        return passage_ids(self.encoder, self.options.max_seq_len) if is_measured else ()

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the engine; none of them is a problem."""
        options = self.options
        code = [
            f"part of the tokenizer's own code (auto_map) is not copied: {problem}"
            for problem in self.tokenizer_code.problems
        ]
        return [
            *(() if options.weights.keeps_blocks else self.checkpoint_notes),
            *self._rounding_notes(),
            *options.notes(),
            *self.target.notes(options),
            *(self.calibration.notes if self.calibration else ()),
            *self.spec.notes(options.max_seq_len),
            *self.encoder.notes(),
            *self.prompt_notes,
            *code,
        ]

    def _rounding_notes(self) -> list[str]:
        """Notes about a checkpoint that is already quantized."""
        num_kept, num_quantized = (num_matrices(self.params, names) for names in (self.kept, self.quantized))
        if not self.checkpoint_notes or not num_quantized:
            return []
        counts = {
            "with the checkpoint's own integers and scales": num_kept,
            f"rounded a second time, to {self.options.quantization}": num_quantized - num_kept,
        }
        return ["; ".join(f"{how}: {count} of {num_quantized} weights" for how, count in counts.items() if count)]


def target_for(name: str, spec: DecoderSpec, config: HfConfig) -> Target:
    """The registry's target `name`, for one checkpoint."""
    target: Target = import_module(TARGETS[name].module).make_target(spec, config)
    return target


def resolve(checkpoint: Checkpoint, options: BuildOptions, *, target: Target | None = None) -> ResolvedBuild:
    """Check checkpoint and options against each other. `target` overrides the one that `options` names.

    Raises `Unsupported` for an unknown architecture or config value, `CheckpointError` for wrong tensors, and
    `RecipeError` if only the options or the calibration data are wrong. The message lists every problem found.
    """
    architecture = _architecture(checkpoint.config, options)
    spec, (program, params, options), target, problems = _network(
        checkpoint.config, options, target, partial(read_pooling, checkpoint)
    )
    encoder, calibration = Encoder(checkpoint, program.vocab_size), None
    if (texts := options.given.get("draft_vocabulary")) and not problems:
        tokens = tokens_of(Path(texts), encoder)
        program, params, options = with_draft_vocabulary(Network(program, params, options), tokens)
    try:
        unread = [re.escape(name) for name in _unread_sources(architecture.params(spec), params)]
        params = named_as_stored(params, architecture.prefix, checkpoint.tensors)
        weights = plan_weights(checkpoint, params, (*architecture.ignored, *spec.ignored, *unread))
    except CheckpointError as error:
        if problems:
            raise CheckpointError("\n".join([str(error), "and the build options are wrong:", *problems])) from error
        raise
    raise_problems(RecipeError, "this build cannot be done", problems)
    assert target is not None
    code = find_tokenizer_code(checkpoint.path) if checkpoint.path.is_dir() else TokenizerCode()  # of a GGUF file: none
    quantized = _quantized(checkpoint, Network(program, params, options), weights, target)
    kept = _kept(quantized, weights, options.dtype) if target.rounds_activations else []
    encoder.require_readable()
    if options.calibration_data and not quantized.keys() - kept:
        raise RecipeError(
            "calibration_data has no effect because every weight keeps the checkpoint's integers; leave it out"
        )
    if options.calibration_data:
        calibration = read_calibration(Path(options.calibration_data), encoder, max_seq_len=options.max_seq_len)
    prompts = prompt_notes(checkpoint) if spec.pooling and not spec.pooling.scores else ()
    return ResolvedBuild(
        spec, params, program, options, target, weights, code, quantized, kept, encoder, calibration, checkpoint.notes,
        prompts,
    )  # fmt: skip


def resolve_network(config: HfConfig, options: BuildOptions, *, target: Target | None = None) -> tuple[Network, Target]:
    """Returns everything that follows from a config and the options alone; raises the same errors as `resolve`."""
    _, network, target, problems = _network(config, options, target)
    raise_problems(RecipeError, "this build cannot be done", problems)
    assert target is not None
    return network, target


def longest_sequence(checkpoint: Path) -> int:
    """The number of positions that a checkpoint was made for."""
    config = read_config(checkpoint)
    spec: DecoderSpec = architecture_for(config).from_hf(config)
    return spec.max_position_embeddings


def _network(
    config: HfConfig,
    options: BuildOptions,
    target: Target | None,
    pooling_of: Callable[[Pooling | None], Pooling | None] = lambda usual: usual,
) -> tuple[DecoderSpec, Network, Target | None, list[str]]:
    """The network and all problems; the target is known if no earlier problem was found."""
    architecture = _architecture(config, options)
    spec = architecture.from_hf(config)
    spec = replace(spec, pooling=pooling_of(spec.pooling))
    problems = options.problems() + _length_problems(spec, options)
    options = replace(options, max_seq_len=options.max_seq_len or spec.usual_seq_len)
    program = architecture.program(spec.for_sequences(options.max_seq_len))
    _check_direction(spec, program)
    read = {name for op in program.ops for name in op.weights}
    params = [param for param in architecture.params(spec) if param.name in read]
    problems += _step_problems(program, options)
    if not problems:
        target = target or target_for(options.target, spec, config)
        problems += target.problems(program, params, options)
        if options.calibration_data and not target.rounds_activations:
            problems.append(f"calibration_data has no effect on the {target.name} target; leave it out")
    return spec, Network(program, params, options), target, problems


def _architecture(config: HfConfig, options: BuildOptions) -> AnyArchitecture:
    """The architecture of the network, or of its layer for drafts."""
    architecture = architecture_for(config)
    if not options.drafting_layer:
        return architecture
    if architecture.drafter is None:
        raise Unsupported(f"{architecture.names[0]} has no supported layer for drafts; leave out drafting_layer")
    return architecture.drafter


def _quantized(
    checkpoint: Checkpoint, network: Network, weights: WeightPlan, target: Target
) -> Mapping[str, Sequence[WeightPart]]:
    """Parameters that are quantized: as the options say, or as in a GGUF file."""
    program, params, options = network
    if not options.weights.keeps_blocks:
        found = quantized_params(program, params, options)
        return {**found, **(rounded_tables(program, params, found) if target.rounds_tables else {})}
    stored = stored_parts(program, params, weights, with_tables=target.rounds_tables)
    if not stored:
        raise RecipeError(
            f"quantization {options.quantization} keeps blocks of a GGUF file, but {checkpoint.path.name} has none; "
            f"leave it out, or use {' or '.join(ROUNDED)}"
        )
    mixed = [
        f"the experts of {name} have several types ({', '.join(part.scheme.format.name for part in stored[name])}); "
        f"use only dtype {options.dtype}, or quantization {' or '.join(ROUNDED)}"
        for op in program.ops
        if op.kind is OpKind.EXPERTS
        for name in op.weights
        if len(stored.get(name, ())) > 1
    ]
    raise_problems(RecipeError, "this build cannot be done", mixed)
    return stored


def _kept(quantized: Mapping[str, Sequence[WeightPart]], weights: WeightPlan, dtype: str) -> list[str]:
    return [name for name, parts in quantized.items() if keeps_integers(parts, weights.rows(name, dtype))]


def _unread_sources(listed: Sequence[Param], read: Sequence[Param]) -> set[str]:
    """Tensors of parameters that the program does not use: the head's, if texts are pooled."""
    sources, kept = ({name for param in params for name in param.sources} for params in (listed, read))
    return sources - kept


def _check_direction(spec: DecoderSpec, program: Program) -> None:
    """Raise `Unsupported` if tokens attend to later ones and this is not supported."""
    if not any(op.attrs.get("bidirectional") for op in program.ops):
        return
    if not program.pools:
        raise Unsupported(
            "is_causal false in config.json: tokens attend to later ones, so the network makes embeddings or scores, "
            "not text; put the model's modules.json next to it"
        )
    if spec.windows or spec.stateful_layers:
        raise Unsupported("is_causal false in config.json is not supported with sliding windows or Mamba layers")


def _step_problems(program: Program, options: BuildOptions) -> list[str]:
    most, longest = options.max_num_tokens, options.max_seq_len
    if program.needs_whole and most < longest:
        return [
            f"max_num_tokens is {most}, but this network reads a whole text, of up to {longest} tokens, in one step: "
            f"increase it to {longest}, or decrease max_seq_len to {most}"
        ]
    return []


def _length_problems(spec: DecoderSpec, options: BuildOptions) -> list[str]:
    limit = spec.max_position_embeddings
    if options.max_seq_len > limit:
        return [f"max_seq_len is {options.max_seq_len}, but the checkpoint was made for at most {limit} positions"]
    return []
