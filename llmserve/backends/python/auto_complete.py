"""`auto_complete_config`: a model sets its own tensors, batch size and policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput

from llmserve.serving.config.proto_json import message_to_dict


class AutoCompleteConfig:
    """`pb_utils.ModelConfig`: adds settings that `config.pbtxt` does not have; the existing ones must agree."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @property
    def config(self) -> ModelConfig:
        return self._config

    def as_dict(self) -> dict[str, Any]:
        return message_to_dict(self._config)

    def set_max_batch_size(self, max_batch_size: int) -> None:
        if self._config.max_batch_size > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {self._config.max_batch_size}, but in auto_complete_config "
                f"function for model '{self._config.name}' specifies max_batch_size {max_batch_size}"
            )
        self._config.max_batch_size = max_batch_size

    def set_dynamic_batching(self) -> None:
        if self._config.HasField("sequence_batching"):
            raise ValueError(
                "configuration specified scheduling_choice as 'sequence_batching', but auto_complete_config function "
                f"for model '{self._config.name}' tries to set scheduling_choice as 'dynamic_batching'"
            )
        self._config.dynamic_batching.SetInParent()

    def set_model_transaction_policy(self, policy: Mapping[str, bool]) -> None:
        unknown = sorted(set(policy) - {"decoupled"})
        if unknown:
            raise ValueError(f"model transaction policy property is not 'decoupled': {', '.join(unknown)}")
        if "decoupled" not in policy:
            return
        decoupled = bool(policy["decoupled"])
        if self._config.HasField("model_transaction_policy"):
            current = self._config.model_transaction_policy.decoupled
            if current != decoupled:
                raise ValueError(
                    f"trying to change decoupled property in auto_complete_config for model '{self._config.name}', "
                    f"which is already set to '{current}'"
                )
        self._config.model_transaction_policy.decoupled = decoupled

    def add_input(self, properties: Mapping[str, Any]) -> None:
        self._add(self._config.input, ModelInput, properties, allowed={"name", "data_type", "dims", "optional"})

    def add_output(self, properties: Mapping[str, Any]) -> None:
        self._add(self._config.output, ModelOutput, properties, allowed={"name", "data_type", "dims"})

    def _add(self, declared: Any, kind: Any, properties: Mapping[str, Any], *, allowed: set[str]) -> None:
        if unknown := sorted(set(properties) - allowed):
            raise ValueError(f"tensor '{properties.get('name', '')}' has unknown properties: {', '.join(unknown)}")
        if missing := sorted({"name", "data_type", "dims"} - set(properties)):
            raise ValueError(f"tensor '{properties.get('name', '')}' lacks properties: {', '.join(missing)}")
        tensor = json_format.ParseDict(dict(properties), kind())
        known = next((other for other in declared if other.name == tensor.name), None)
        if known is None:
            declared.append(tensor)
            return
        if properties.get("optional"):
            known.optional = True
        if known.data_type == DataType.TYPE_INVALID:
            known.data_type = tensor.data_type
        elif known.data_type != tensor.data_type:
            raise ValueError(
                f"unable to autofill for '{self._config.name}', tensor '{tensor.name}' is "
                f"{DataType.Name(known.data_type)} in config.pbtxt and {DataType.Name(tensor.data_type)} in the model"
            )
        if not known.dims:
            known.dims.extend(tensor.dims)
        elif list(known.dims) != list(tensor.dims):
            raise ValueError(
                f"unable to autofill for '{self._config.name}', tensor '{tensor.name}' has dims {list(known.dims)} in "
                f"config.pbtxt and {list(tensor.dims)} in the model"
            )
