"""A small streaming client: prompts or chat messages in, text deltas out, over `ModelStreamInfer`.

    with Client("localhost:8001") as client:
        for delta in client.generate("Once upon a time", max_tokens=32, temperature=0.7):
            print(delta.text, end="")

Each generation uses its own gRPC stream. Leaving the loop, or closing the iterator, cancels it on the server.
The names and types of parameters are those of the model's inputs, which the client fetches once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve import errors
from llmserve.errors import InvalidArgument, LlmserveError, Unavailable
from llmserve.frontends.shared.raw_tensors import decode_tensor, encode_tensor
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import ADAPTER_NAME, NUMPY_DTYPES, Tensor

Prompt: TypeAlias = str | Sequence[Mapping[str, str]]  # text, or chat messages with `role` and `content`
Scalar: TypeAlias = str | bytes | int | float | bool | np.generic
Parameter: TypeAlias = Scalar | Sequence[Scalar]

# Python types that an input accepts, by the kind of its numpy type; BF16 has no such type and accepts nothing
TAKEN_TYPES: Mapping[str, tuple[type, ...]] = {
    "b": (bool,), "i": (int,), "u": (int,), "f": (float, int), "O": (str, bytes),
}  # fmt: skip
SPEAKS_HTTP = "http1.x server"  # gRPC's message for an HTTP/1 server
CONNECT_FAILURES = ("failed to connect", "connections to all backends failing", "dns resolution failed")
CONNECT_REASONS = {  # gRPC's reasons if a server exists but cannot be used, and what to do
    "certificate_verify_failed": "its certificate is not trusted; give --root-certificates FILE",
    "hostname verification": "its certificate is for another host; give --url a name that the certificate contains",
    "wrong_version_number": "it does not use TLS; give --url without grpcs://",
    "socket closed": "the connection closed: it is stopping, or needs TLS (--url grpcs://HOST:PORT) or a certificate",
}

PLAIN_SCHEMES, TLS_SCHEMES = ("grpc://", "http://"), ("grpcs://", "https://")
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),  # gRPC's default, two minutes, is too long after a restart
)
ERROR_OF_CODE: Mapping[str, type[LlmserveError]] = {
    error.code.value: error
    for error in (
        errors.InvalidArgument, errors.NotFound, errors.AlreadyExists, errors.Unsupported, errors.ResourceExhausted,
        errors.Unavailable, errors.DeadlineExceeded, errors.Cancelled, errors.InternalError,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sequence. The last delta of a sequence has its counts and finish reason."""

    text: str
    sequence_index: int = 0
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that were accepted
    cum_log_prob: float = 0.0  # this and log_probs only with return_log_probs
    log_probs: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()  # of the text; only with return_tokens
    warning: str = ""  # in an answer's last delta: parts of the request that were truncated or ignored
    receipt: str = ""  # in an answer's last delta, with return_receipt: JSON, for `llmserve verify`


@dataclass(frozen=True, slots=True)
class Access:
    """The API key that the client sends, and the certificates that it trusts. Keys are sent in plain text: use grpcs://
    to encrypt them."""

    api_key: str = field(default="", repr=False)
    root_certificates: Path | None = None  # PEM, certificates that may sign the server's; None: those of this machine

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The API key's header. Raises `InvalidArgument` for an impossible key; gRPC would print a traceback."""
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidArgument("an API key has only printable ASCII characters; check how it was copied")
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def credentials(self, url: str) -> grpc.ChannelCredentials | None:
        """Returns None for a connection without TLS. Raises `InvalidArgument` if the certificates cannot be read."""
        if not url.startswith(TLS_SCHEMES):
            if self.root_certificates is not None:
                raise InvalidArgument(f"certificates require TLS; use grpcs://{_target(url)}")
            return None
        try:
            roots = None if self.root_certificates is None else self.root_certificates.read_bytes()
        except OSError as error:
            raise InvalidArgument(f"the certificates cannot be read: {error}") from error
        return grpc.ssl_channel_credentials(roots)


class Client:
    """A blocking client with one connection. Safe to use from any number of threads.

    Do not use it after Ctrl-C: an interrupt inside gRPC's blocking code can leave the connection locked.
    """

    def __init__(self, url: str, *, model: str = "ensemble", access: Access = Access()) -> None:
        """`url` is HOST:PORT, or grpcs://HOST:PORT for TLS."""
        self.url = _target(url)
        self.model = model
        self._metadata = access.metadata
        secure = access.credentials(url)
        self._channel = (
            grpc.insecure_channel(self.url, CHANNEL_OPTIONS)
            if secure is None
            else grpc.secure_channel(self.url, secure, CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._config: ModelConfig | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def config(self) -> ModelConfig:
        """Return the model's config. Raises `Unavailable` if no server answers, `NotFound` if it has no such model."""
        if self._config is None:
            try:
                request = service_pb2.ModelConfigRequest(name=self.model)
                self._config = self._stub.ModelConfig(request, metadata=self._metadata).config
            except grpc.RpcError as error:
                raise _failure(self.url, error) from error
        return self._config

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        stream: bool = True,
        request_id: str = "",
        timeout_s: float | None = None,
        **parameters: Parameter,
    ) -> Generator[TextDelta, None, None]:
        """Yield deltas as they arrive; with `stream=False`, one delta per sequence."""
        tensors = {"max_tokens": max_tokens, "stream": stream, **parameters}
        request = build_request(self.config(), prompt, tensors, request_id=request_id)
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout_s, metadata=self._metadata)
        try:
            for message in call:
                yield parse_response(message)
        except grpc.RpcError as error:
            raise _failure(self.url, error, streaming=True) from error
        finally:
            call.cancel()


class AsyncClient:
    """A client for asyncio with one connection. Safe to use from any number of tasks of one event loop."""

    def __init__(self, url: str, *, model: str = "ensemble", access: Access = Access(), adapter: str = "") -> None:
        """See `Client`. `adapter`: the name of the LoRA adapter for all requests."""
        self.url = _target(url)
        self.model = model
        self._adapter = adapter
        self._metadata = access.metadata
        secure = access.credentials(url)
        self._channel = (
            grpc.aio.insecure_channel(self.url, CHANNEL_OPTIONS)
            if secure is None
            else grpc.aio.secure_channel(self.url, secure, CHANNEL_OPTIONS)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._config: ModelConfig | None = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def config(self) -> ModelConfig:
        """See `Client.config`."""
        if self._config is None:
            self._config = await self.config_of(self.model)
        return self._config

    async def config_of(self, model: str) -> ModelConfig:
        """Return another model's config, such as that of an ensemble's step."""
        request = service_pb2.ModelConfigRequest(name=model)
        config: ModelConfig = await self._asked(self._stub.ModelConfig, request, "config")
        return config

    async def model_names(self) -> list[str]:
        """Return the names of the loaded models that answer text with text. If the server has API keys, this requires
        an admin key."""
        request = service_pb2.RepositoryIndexRequest(ready=True)
        names = {entry.name for entry in await self._asked(self._stub.RepositoryIndex, request, "models")}
        configs = [await self.config_of(name) for name in sorted(names)]
        return [config.name for config in configs if _takes_text(config)]

    async def is_ready(self) -> bool:
        """Return whether the model is ready. Also drops the cached config, because the server may have changed."""
        self._config = None
        try:
            reply = await self._stub.ModelReady(service_pb2.ModelReadyRequest(name=self.model))
        except grpc.RpcError:
            return False
        return bool(reply.ready)

    def _adapted(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
        if self._adapter:
            request.parameters[ADAPTER_NAME].string_param = self._adapter
        return request

    async def _asked(self, call: Any, request: Any, member: str) -> Any:
        """Decode a member of the reply."""
        try:
            return getattr(await call(request, metadata=self._metadata), member)
        except grpc.RpcError as error:
            raise _failure(self.url, error) from error

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        stream: bool = True,
        request_id: str = "",
        timeout_s: float | None = None,
        **parameters: Parameter,
    ) -> AsyncGenerator[TextDelta, None]:
        """See `Client.generate`. Iterate inside `aclosing`, so that leaving the loop early cancels at once."""
        tensors = {"max_tokens": max_tokens, "stream": stream, **parameters}
        request = self._adapted(build_request(await self.config(), prompt, tensors, request_id=request_id))
        async with aclosing(self._messages(request, timeout_s)) as messages:
            async for message in messages:
                yield parse_response(message)

    async def infer(
        self, inputs: Mapping[str, Parameter], *, request_id: str = "", timeout_s: float | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the outputs of the first response to `inputs`, by name. For models whose input is not text."""
        request = self._adapted(request_of(await self.config(), inputs, request_id=request_id))
        async with aclosing(self._messages(request, timeout_s)) as messages:
            async for message in messages:
                return _outputs(message)
        raise Unavailable(f"{self.url} ended the stream without an answer from model '{self.model}'")

    async def _messages(self, request: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """Responses to one request, on a stream of its own."""
        call = self._stub.ModelStreamInfer(timeout=timeout_s, metadata=self._metadata)
        try:
            with suppress(grpc.aio.InternalError):  # a broken connection; it has no status, but the next read does
                await call.write(request)
                await call.done_writing()
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise _failure(self.url, error, streaming=True) from error
        finally:
            call.cancel()


def _takes_text(config: ModelConfig) -> bool:
    return {"text_input", "text_output"} <= {entry.name for entry in (*config.input, *config.output)}


def build_request(
    config: ModelConfig, prompt: Prompt, parameters: Mapping[str, Parameter], *, request_id: str = ""
) -> service_pb2.ModelInferRequest:
    """Build tensors for the model's inputs. Raises `InvalidArgument` for an unknown parameter, and for a value that is
    not of the input's type: values are never rounded, parsed or truncated."""
    values = dict(parameters)
    if isinstance(prompt, str):
        values["text_input"] = prompt
    else:
        values["messages"] = json.dumps([dict(message) for message in prompt], ensure_ascii=False)
    return request_of(config, values, request_id=request_id)


def request_of(
    config: ModelConfig, values: Mapping[str, Parameter], *, request_id: str = ""
) -> service_pb2.ModelInferRequest:
    """Like `build_request`, for inputs by name."""
    datatypes = {entry.name: datatype_name(entry.data_type) for entry in config.input}
    unknown = sorted(values.keys() - datatypes.keys())
    if unknown:
        raise InvalidArgument(
            f"model '{config.name}' has no input named {', '.join(unknown)}; it has: {', '.join(sorted(datatypes))}"
        )
    request = service_pb2.ModelInferRequest(model_name=config.name, id=request_id)
    for name, value in values.items():
        tensor = _tensor(name, datatypes[name], value, batched=config.max_batch_size > 0)
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(encode_tensor(tensor))
    return request


def _tensor(name: str, datatype: str, value: Parameter, *, batched: bool) -> Tensor:
    items = list(value) if isinstance(value, Sequence | np.ndarray) and not isinstance(value, Scalar) else [value]
    items = [item.item() if isinstance(item, np.generic) else item for item in items]
    dtype = NUMPY_DTYPES[datatype]
    taken = () if datatype == "BF16" else TAKEN_TYPES[dtype.kind]
    for item in items:
        if not isinstance(item, taken) or (isinstance(item, bool) and bool not in taken):
            names = " or ".join(each.__name__ for each in taken) or "no Python type"
            raise InvalidArgument(f"{name}={value!r} is not {datatype}: give {names}, not {type(item).__name__}")
    try:
        if datatype == "BYTES":
            items = [item.encode() if isinstance(item, str) else item for item in items]
        with np.errstate(over="raise"):  # a number beyond FP32 would become infinite
            data = np.array(items, dtype=dtype)
    except (ValueError, OverflowError, FloatingPointError) as error:
        raise InvalidArgument(f"{name}={value!r} is not {datatype}: {error}") from error
    return Tensor(name, datatype, data.reshape(1, -1) if batched else data)


def parse_response(message: service_pb2.ModelStreamInferResponse) -> TextDelta:
    """Return the delta of one message. Raises the error that the message carries."""
    outputs: dict[str, Any] = {name: data.reshape(-1).tolist() for name, data in _outputs(message).items()}

    def first(name: str, default: Any) -> Any:
        return next(iter(outputs.get(name, ())), default)

    return TextDelta(
        text=first("text_output", b"").decode("utf-8", errors="replace"),
        sequence_index=first("sequence_index", 0),
        finish_reason=first("finish_reason", b"").decode(),
        prompt_tokens=first("num_prompt_tokens", 0),
        cached_tokens=first("num_cached_tokens", 0),
        completion_tokens=first("num_completion_tokens", 0),
        drafted_tokens=first("total_draft_tokens", 0),
        accepted_tokens=first("total_accepted_draft_tokens", 0),
        cum_log_prob=first("cum_log_probs", 0.0),
        log_probs=tuple(outputs.get("output_log_probs", ())),
        token_ids=tuple(outputs.get("output_token_ids", ())),
        warning=first("warning", b"").decode("utf-8", errors="replace"),
        receipt=first("receipt", b"").decode("utf-8", errors="replace"),
    )


def _outputs(message: service_pb2.ModelStreamInferResponse) -> dict[str, NDArray[Any]]:
    """Return the outputs of one message, by name. Raises the error that the message carries."""
    if message.error_message:
        raise LlmserveError(message.error_message)
    response = message.infer_response
    return {
        output.name: decode_tensor(
            output.name, output.datatype, output.shape, raw, model=response.model_name
        ).data
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }  # fmt: skip


def _target(url: str) -> str:
    for scheme in (*PLAIN_SCHEMES, *TLS_SCHEMES):
        url = url.removeprefix(scheme)
    return url.rstrip("/")


def _failure(url: str, error: Any, *, streaming: bool = False) -> LlmserveError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and SPEAKS_HTTP in details:
        what_to_do = "give --url the server's gRPC address, localhost:8001 by default"
        return Unavailable(f"{url} is a port for HTTP or metrics, but this command uses gRPC; {what_to_do}")
    if code is grpc.StatusCode.UNAVAILABLE and details.lower().startswith(CONNECT_FAILURES):
        for said, reason in CONNECT_REASONS.items():
            if said in details.lower():
                return Unavailable(f"{url} cannot be reached: {reason}")
        return Unavailable(f"no server answers at {url}; start one with `llmserve serve ENGINE_DIR`, or check --url")
    if code is grpc.StatusCode.UNAUTHENTICATED:  # names the missing header; users need the flag
        required = "an API key" if "send the header" in details else "another API key"
        return InvalidArgument(f"{url} requires {required}: give it with --api-key KEY or in LLMSERVE_API_KEY")
    if code is grpc.StatusCode.UNAVAILABLE and streaming:  # a server's own refusals arrive as messages of the stream
        return Unavailable(f"the connection to {url} was lost: {details}")
    return ERROR_OF_CODE.get(code.name, LlmserveError)(details or code.name)
