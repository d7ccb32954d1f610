"""The RPCs of the protocol's extensions: model repository, logging, tracing, shared memory."""

# ruff: noqa: N802  # method names are the protocol's

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from llmserve.errors import InvalidArgument, NotFound, Unsupported
from llmserve.frontends.shared.extension_state import Extensions
from llmserve.frontends.shared.log_settings import FLAGS, LogValue
from llmserve.frontends.shared.model_control import (
    CONFIG_PARAMETER,
    FILE_PREFIX,
    UNLOAD_DEPENDENTS,
    check_repository_name,
    unknown_load_parameter,
)
from llmserve.frontends.shared.server_core import Core, check_known_model
from llmserve.frontends.shared.shared_memory import CUDA_REFUSAL
from llmserve.frontends.shared.trace_settings import SETTINGS

# log setting -> the field of its value, and the field's name in errors
LOG_FIELDS = {
    **dict.fromkeys(FLAGS, ("bool_param", "boolean")),
    "log_verbose_level": ("uint32_param", "int32"),
    "log_format": ("string_param", "string"),
    "log_file": ("string_param", "string"),
}


class ExtensionRpcs:
    """One method per RPC; the others are in `inference_service`. `error_status` converts their errors to a status."""

    def __init__(self, core: Core, extensions: Extensions) -> None:
        self._core = core
        self._extensions = extensions

    async def RepositoryIndex(self, request: Any, context: Any) -> service_pb2.RepositoryIndexResponse:
        check_repository_name(request.repository_name)
        reply = service_pb2.RepositoryIndexResponse()
        for row in self._core.repository_index(ready=request.ready):
            reply.models.add(name=row.name, version=row.version, state=row.state, reason=row.reason)
        return reply

    async def RepositoryModelLoad(self, request: Any, context: Any) -> service_pb2.RepositoryModelLoadResponse:
        check_repository_name(request.repository_name)
        config, files = _load_parameters(request.parameters)
        await self._core.load_model(request.model_name, config, files)
        return service_pb2.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> service_pb2.RepositoryModelUnloadResponse:
        check_repository_name(request.repository_name)
        dependents = False
        if UNLOAD_DEPENDENTS in request.parameters:
            parameter = request.parameters[UNLOAD_DEPENDENTS]
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                raise InvalidArgument(f"invalid value type for '{UNLOAD_DEPENDENTS}' parameter, expected bool_param.")
            dependents = parameter.bool_param
        await self._core.unload_model(request.model_name, unload_dependents=dependents)
        return service_pb2.RepositoryModelUnloadResponse()

    async def LogSettings(self, request: Any, context: Any) -> service_pb2.LogSettingsResponse:
        values = {name: _log_value(name, setting) for name, setting in request.settings.items() if name in LOG_FIELDS}
        self._extensions.logs.update(values)
        reply = service_pb2.LogSettingsResponse()
        for name, value in self._extensions.logs.describe().items():
            setattr(reply.settings[name], LOG_FIELDS[name][0], value)
        return reply

    async def TraceSetting(self, request: Any, context: Any) -> service_pb2.TraceSettingResponse:
        model = request.model_name
        check_known_model(self._core, model)
        settings = {name: setting.value for name, setting in request.settings.items() if name in SETTINGS}
        update = {name: _trace_value(name, values) for name, values in settings.items()}
        if update:
            self._extensions.tracer.update(model, update)
        reply = service_pb2.TraceSettingResponse()
        for name, value in self._extensions.tracer.describe(model).items():
            reply.settings[name].value.extend([value] if isinstance(value, str) else value)
        return reply

    async def SystemSharedMemoryStatus(
        self, request: Any, context: Any
    ) -> service_pb2.SystemSharedMemoryStatusResponse:
        reply = service_pb2.SystemSharedMemoryStatusResponse()
        for region in self._extensions.memory.status(request.name):
            row = reply.regions[region.name]
            row.name, row.key, row.offset, row.byte_size = region.name, region.key, region.offset, region.byte_size
        return reply

    async def SystemSharedMemoryRegister(
        self, request: Any, context: Any
    ) -> service_pb2.SystemSharedMemoryRegisterResponse:
        self._extensions.memory.register(request.name, request.key, offset=request.offset, byte_size=request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: Any, context: Any
    ) -> service_pb2.SystemSharedMemoryUnregisterResponse:
        """Unregisters all regions if the request has no name."""
        if request.name:
            self._extensions.memory.unregister(request.name)
        else:
            self._extensions.memory.unregister_all()
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> service_pb2.CudaSharedMemoryStatusResponse:
        if request.name:
            raise NotFound(f"Unable to find cuda shared memory region: '{request.name}'")
        return service_pb2.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(
        self, request: Any, context: Any
    ) -> service_pb2.CudaSharedMemoryRegisterResponse:
        self._extensions.memory.check_allowed()
        raise Unsupported(CUDA_REFUSAL)

    async def CudaSharedMemoryUnregister(
        self, request: Any, context: Any
    ) -> service_pb2.CudaSharedMemoryUnregisterResponse:
        self._extensions.memory.check_allowed()
        return service_pb2.CudaSharedMemoryUnregisterResponse()


def _load_parameters(
    parameters: Mapping[str, service_pb2.ModelRepositoryParameter],
) -> tuple[str, dict[str, bytes]]:
    """The config that replaces the model's own ("": none), and files by their path in its directory."""
    config = ""
    files: dict[str, bytes] = {}
    for name, parameter in parameters.items():
        expected = "string_param" if name == CONFIG_PARAMETER else "bytes_param"
        if name != CONFIG_PARAMETER and not name.startswith(FILE_PREFIX):
            unknown_load_parameter(name)
        if parameter.WhichOneof("parameter_choice") != expected:
            raise InvalidArgument(f"invalid value type for load parameter '{name}', expected {expected}.")
        if name == CONFIG_PARAMETER:
            config = parameter.string_param
        else:
            files[name.removeprefix(FILE_PREFIX)] = parameter.bytes_param
    return config, files


def _log_value(name: str, setting: service_pb2.LogSettingsRequest.SettingValue) -> LogValue:
    field, expected = LOG_FIELDS[name]
    if setting.WhichOneof("parameter_choice") != field:
        raise InvalidArgument(f"expect {expected} for '{name}'")
    value: LogValue = getattr(setting, field)
    return value


def _trace_value(name: str, values: Any) -> str | list[str] | None:
    """No value clears a setting."""
    if not values:
        return None
    if name == "trace_level":
        return list(values)
    if len(values) > 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'")
    return str(values[0])
