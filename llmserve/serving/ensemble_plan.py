"""Checks an ensemble's config against its models, and plans stages of steps in the order of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelEnsembling

from llmserve.errors import LlmserveError, ModelConfigError, raise_problems
from llmserve.serving.model import ServedModel
from llmserve.serving.signature import ModelSignature, TensorSpec, format_shape


@dataclass(frozen=True, slots=True)
class Step:
    """One model of an ensemble. Mappings are (tensor of the model, tensor of the ensemble)."""

    model_name: str
    model_version: str  # "": the highest served
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    requested_outputs: tuple[str, ...]  # empty: all
    decoupled: bool
    needed_outputs: tuple[str, ...] = ()  # see `InferRequest`
    place: int = 0  # position in the config
    targets: Mapping[str, str] = field(init=False, repr=False, compare=False)  # `outputs`, for look-up

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", dict(self.outputs))


@dataclass(frozen=True, slots=True)
class Stage:
    """Unary steps, then decoupled ones; later stages run once for each response of the decoupled steps.

    A unary step comes after those that it reads from. Several decoupled steps respond in rounds.
    """

    unary: tuple[Step, ...]
    decoupled: tuple[Step, ...]  # empty in the last stage
    is_chain: bool = field(init=False)  # every unary step reads from the one before it: nothing runs at the same time

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_chain", all(reads_from(step, before) for before, step in pairwise(self.unary)))


def reads_from(step: Step, producer: Step) -> bool:
    made = {tensor for _, tensor in producer.outputs}
    return any(tensor in made for _, tensor in step.inputs)


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    steps: tuple[Step, ...]  # each after those that it reads from

    @property
    def decoupled(self) -> bool:
        return any(step.decoupled for step in self.steps)

    def stages(
        self, wanted: Collection[str], *, by_name: bool = True, needed: Collection[str] = ()
    ) -> tuple[Stage, ...]:
        """The stages that must run for these outputs. Each step is asked only for outputs that are read.

        `by_name`: the client has named the outputs. If not, a step whose outputs are all read is not asked for
        particular ones: it may leave out outputs that have no meaning for the request, except those that a later step
        reads and those in `needed`.
        """
        return _stages(_needed(self.steps, wanted, by_name=by_name, needed=needed))


def _needed(steps: tuple[Step, ...], wanted: Collection[str], *, by_name: bool, needed: Collection[str]) -> list[Step]:
    """The steps that produce the wanted tensors, each with those of its outputs that are read."""
    read_later = set(needed)  # by later steps, whose models may rely on them
    tensors = {*wanted, *needed}
    chosen = []
    for step in reversed(steps):
        read = tuple((name, tensor) for name, tensor in step.outputs if tensor in tensors)
        if read:
            if by_name or step.requested_outputs or len(read) < len(step.outputs):
                asked = replace(step, outputs=read, requested_outputs=tuple(name for name, _ in read))
            else:
                asked = replace(step, needed_outputs=tuple(name for name, tensor in read if tensor in read_later))
            chosen.append(asked)
            inputs = {tensor for _, tensor in step.inputs}
            tensors |= inputs
            read_later |= inputs
    return chosen[::-1]


def _stages(steps: list[Step]) -> tuple[Stage, ...]:
    stages = []
    while True:
        waiting: set[str] = set()  # tensors produced after this stage
        unary: list[Step] = []
        decoupled: list[Step] = []
        later: list[Step] = []
        for step in steps:
            if any(tensor in waiting for _, tensor in step.inputs):
                later.append(step)
            else:
                (decoupled if step.decoupled else unary).append(step)
            if step.decoupled or step in later:
                waiting.update(tensor for _, tensor in step.outputs)
        stages.append(Stage(tuple(unary), tuple(decoupled)))
        if not decoupled:
            return tuple(stages)
        steps = later


def step_models(config: ModelConfig) -> list[str]:
    return sorted({step.model_name for step in config.ensemble_scheduling.step})


def plan_ensemble(config: ModelConfig, find: Callable[[str, str], ServedModel]) -> EnsemblePlan:
    """Plan the steps of an ensemble. Raises `ModelConfigError` that lists all problems."""
    planner = _Planner(config)
    steps = [planner.add(*numbered, find) for numbered in enumerate(config.ensemble_scheduling.step)]
    planner.check_ends()
    known = [step for step in steps if step is not None]
    ordered = planner.order(known) if len(known) == len(steps) else ()  # if one is missing, the order cannot be checked
    raise_problems(ModelConfigError, f"ensemble '{config.name}' cannot be loaded", planner.problems)
    return EnsemblePlan(tuple(ordered))


class _Planner:
    """Collects problems while steps are added. The first use of an ensemble's tensor determines its type and shape."""

    def __init__(self, config: ModelConfig) -> None:
        self.problems: list[str] = []
        self._config = config
        self._signature = ModelSignature(config)
        self._producers: dict[str, str] = dict.fromkeys(self._signature.inputs, "the ensemble's inputs")
        self._specs: dict[str, tuple[TensorSpec, int]] = {}  # ensemble tensor -> its first use, max batch size
        self._used: set[str] = set()
        self._missing: dict[str, str] = {}  # tensor of the ensemble -> the output that never produces it
        self._required: list[tuple[str, str]] = []  # tensor of the ensemble, the input that needs it
        for spec in (*self._signature.inputs.values(), *self._signature.outputs.values()):
            self._see(spec.name, spec, self._signature, "the ensemble")
        if not config.ensemble_scheduling.step:
            self.problems.append("it has no steps")

    def add(self, place: int, declared: ModelEnsembling.Step, find: Callable[[str, str], ServedModel]) -> Step | None:
        version = "" if declared.model_version in (0, -1) else str(declared.model_version)
        if declared.model_namespace:
            self.problems.append(f"step '{declared.model_name}': model_namespace is not supported; remove it")
        self._wire(declared)  # also if the model is missing, so that only that is reported
        try:
            model = find(declared.model_name, version)
        except LlmserveError as error:
            self.problems.append(f"step '{declared.model_name}': {error}")
            return None
        self._check_batching(model)
        self._check_maps(declared, model.signature)
        for output, tensor in declared.output_map.items():
            if output in model.missing_outputs:
                self._missing[tensor] = f"output '{output}' of '{model.name}'"
        named = tuple(declared.output_map)
        return Step(
            model.name,
            version,
            tuple(declared.input_map.items()),
            tuple(declared.output_map.items()),
            () if set(named) == set(model.signature.outputs) else named,
            model.decoupled,
            place=place,
        )

    def check_ends(self) -> None:
        """Check that all outputs and all tensors that are read are produced, and that all inputs are used."""
        unmade = [name for name in self._signature.outputs if name not in self._producers]
        self.problems += [f"output '{name}' is not produced by any step" for name in unmade]
        self.problems += [
            f"tensor '{name}' is read by a step but nothing produces it"
            for name in sorted(self._used - set(self._producers))
        ]
        self.problems += [
            f"input '{name}' is not used by any step" for name in self._signature.inputs if name not in self._used
        ]
        self.problems += [
            f"{reader} is required, but the backend never produces {self._missing[tensor]}; mark the input as optional"
            for tensor, reader in self._required
            if tensor in self._missing
        ]

    def order(self, steps: list[Step]) -> list[Step]:
        """Steps sorted by their tensors."""
        available = set(self._signature.inputs) | (self._used - set(self._producers))
        ordered: list[Step] = []
        while steps:
            due = [step for step in steps if all(tensor in available for _, tensor in step.inputs)]
            if not due:
                stuck = ", ".join(f"'{step.model_name}'" for step in steps)
                self.problems.append(f"steps {stuck} wait for each other's outputs: they form a cycle")
                break
            ordered += due
            steps = [step for step in steps if step not in due]
            available.update(tensor for step in due for _, tensor in step.outputs)
        return ordered

    def _check_batching(self, model: ServedModel) -> None:
        mine, its = self._signature.max_batch_size, model.signature.max_batch_size
        if mine > max(its, 1):
            self.problems.append(f"max_batch_size is {mine}, but step '{model.name}' allows at most {its}")

    def _wire(self, declared: ModelEnsembling.Step) -> None:
        """Record the tensors that the step reads and produces."""
        label = f"step '{declared.model_name}'"
        self._used.update(declared.input_map.values())
        for tensor in declared.output_map.values():
            if tensor in self._producers:
                self.problems.append(f"tensor '{tensor}' has two producers: {self._producers[tensor]} and {label}")
            self._producers[tensor] = label

    def _check_maps(self, declared: ModelEnsembling.Step, signature: ModelSignature) -> None:
        label = f"step '{declared.model_name}'"
        for name, tensor in declared.input_map.items():
            if name not in signature.inputs:
                self.problems.append(f"{label}: input_map names '{name}', which is not an input of the model")
            else:
                self._see(tensor, signature.inputs[name], signature, label)
                if not signature.inputs[name].optional:
                    self._required.append((tensor, f"{label}: input '{name}'"))
        for name, tensor in declared.output_map.items():
            if name not in signature.outputs:
                self.problems.append(f"{label}: output_map names '{name}', which is not an output of the model")
            else:
                self._see(tensor, signature.outputs[name], signature, label)
        missing = [n for n, spec in signature.inputs.items() if not spec.optional and n not in declared.input_map]
        self.problems += [f"{label}: input '{name}' of the model is not mapped" for name in missing]

    def _see(self, tensor: str, spec: TensorSpec, signature: ModelSignature, label: str) -> None:
        """Compare a use of a tensor with its first use."""
        first, batch = self._specs.setdefault(tensor, (spec, signature.max_batch_size))
        if first.datatype != spec.datatype:
            self.problems.append(f"tensor '{tensor}' is {first.datatype}, but {label} has it as {spec.datatype}")
        mine, its = _full_dims(first, batch), _full_dims(spec, signature.max_batch_size)
        if not _compatible(mine, its):
            self.problems.append(
                f"tensor '{tensor}' has shape {format_shape(mine)}, but {label} has it as {format_shape(its)}"
            )


def _full_dims(spec: TensorSpec, max_batch_size: int) -> tuple[int, ...]:
    return (-1, *spec.dims) if max_batch_size > 0 else spec.dims


def _compatible(left: Sequence[int], right: Sequence[int]) -> bool:
    return len(left) == len(right) and all(a == b or -1 in (a, b) for a, b in zip(left, right, strict=True))
