"""Checks a config's `sequence_batching`, and fills in its defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching

from llmserve.serving.signature import datatype_name

DEFAULT_IDLE_US = 1_000_000

_Control = ModelSequenceBatching.Control
_VALUE_FIELDS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_ID_TYPES = (
    DataType.TYPE_UINT64,
    DataType.TYPE_INT64,
    DataType.TYPE_UINT32,
    DataType.TYPE_INT32,
    DataType.TYPE_STRING,
)


def fill_sequence_defaults(config: ModelConfig) -> None:
    if config.HasField("sequence_batching") and not config.sequence_batching.max_sequence_idle_microseconds:
        config.sequence_batching.max_sequence_idle_microseconds = DEFAULT_IDLE_US


def implicit_inputs(config: ModelConfig) -> dict[str, str]:
    """The inputs that the scheduler adds to every request: name -> KServe's datatype."""
    controls = {
        declared.name: _control_datatype(control)
        for declared in config.sequence_batching.control_input
        for control in declared.control
    }
    states = {state.input_name: datatype_name(state.data_type) for state in config.sequence_batching.state}
    return {**controls, **states}


def implicit_outputs(config: ModelConfig) -> dict[str, str]:
    """The outputs that the scheduler keeps as state: name -> KServe's datatype."""
    return {state.output_name: datatype_name(state.data_type) for state in config.sequence_batching.state}


def _control_datatype(control: ModelSequenceBatching.Control) -> str:
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        return datatype_name(control.data_type)
    return next((field.partition("_")[0].upper() for field in _VALUE_FIELDS if getattr(control, field)), "INVALID")


def sequence_problems(config: ModelConfig) -> list[str]:
    if not config.HasField("sequence_batching"):
        return []
    sequences = config.sequence_batching
    problems = [
        *_control_problems(sequences.control_input),
        *(problem for state in sequences.state for problem in _state_problems(state)),
        *_strategy_problems(config),
    ]
    added = [declared.name for declared in sequences.control_input] + [state.input_name for state in sequences.state]
    names = Counter(added + [tensor.name for tensor in config.input])
    problems += [f"sequence_batching: input '{name}' is declared {n} times" for name, n in names.items() if n > 1]
    return [problem if problem.startswith("sequence") else f"sequence_batching: {problem}" for problem in problems]


def _control_problems(inputs: Iterable[ModelSequenceBatching.ControlInput]) -> list[str]:
    problems = []
    kinds: Counter[int] = Counter()
    for declared in inputs:
        if not declared.name:
            problems.append("a control_input has no name")
        if len(declared.control) != 1:
            problems.append(f"control_input '{declared.name}' must have one control, got {len(declared.control)}")
        for control in declared.control:
            kinds[control.kind] += 1
            problems += _value_problems(declared.name, control)
    problems += [
        f"sequence batching specifies multiple {_Control.Kind.Name(kind)} tensors"
        for kind, number in kinds.items()
        if number > 1
    ]
    return problems


def _value_problems(name: str, control: ModelSequenceBatching.Control) -> list[str]:
    label = f"control_input '{name}'"
    given = [field for field in _VALUE_FIELDS if getattr(control, field)]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        problems = [f"{label}: {field} has no meaning for CONTROL_SEQUENCE_CORRID" for field in given]
        if control.data_type not in _ID_TYPES:
            types = ", ".join(DataType.Name(data_type) for data_type in _ID_TYPES)
            problems.append(f"{label}: data_type of CONTROL_SEQUENCE_CORRID must be one of {types}")
        return problems
    if len(given) != 1:
        return [f"{label}: give one of {', '.join(_VALUE_FIELDS)}, got {len(given)}"]
    (field,) = given
    if len(getattr(control, field)) != 2:
        return [f"{label}: {field} must have exactly 2 entries, got {len(getattr(control, field))}"]
    return []


def _state_problems(state: ModelSequenceBatching.State) -> list[str]:
    label = f"state '{state.input_name}'"
    problems = []
    if not state.input_name or not state.output_name:
        problems.append(f"{label}: a state needs an input_name and an output_name")
    if state.data_type == DataType.TYPE_INVALID:
        problems.append(f"{label} has no data_type")
    if any(dim < 1 and dim != -1 for dim in state.dims):
        problems.append(f"{label}: dims must be positive or -1, got {list(state.dims)}")
    if len(state.initial_state) > 1:
        problems.append(f"{label}: there can be one initial_state, got {len(state.initial_state)}")
    for initial in state.initial_state:
        if initial.WhichOneof("state_data") is None:
            problems.append(f"{label}: initial_state has neither zero_data nor data_file")
        if initial.data_type not in (DataType.TYPE_INVALID, state.data_type):
            problems.append(f"{label}: initial_state is of another data_type")
        fits = len(initial.dims) == len(state.dims) and all(
            have > 0 and want in (-1, have) for want, have in zip(state.dims, initial.dims, strict=True)
        )
        if not fits:
            problems.append(f"{label}: dims of initial_state are {list(initial.dims)}, of the state {list(state.dims)}")
    return problems


def _strategy_problems(config: ModelConfig) -> list[str]:
    sequences = config.sequence_batching
    if sequences.HasField("direct"):
        share = sequences.direct.minimum_slot_utilization
        return [] if 0 <= share <= 1 else [f"direct: minimum_slot_utilization must be in 0 .. 1, got {share:g}"]
    problems = [
        f"oldest: preferred_batch_size {size} is not in 1 .. max_batch_size ({config.max_batch_size})"
        for size in sequences.oldest.preferred_batch_size
        if not 1 <= size <= max(1, config.max_batch_size)
    ]
    if sequences.oldest.max_candidate_sequences < 0:
        problems.append("oldest: max_candidate_sequences must not be negative")
    return problems
