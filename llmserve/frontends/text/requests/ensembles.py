"""The models of the text APIs: every loaded ensemble from `text_input` to `text_output`, or to vectors.

A field of the API becomes an input of the ensemble. If the ensemble's config lacks that input, the field is refused
under its name in the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInput

from llmserve.errors import InvalidArgument, LlmserveError, NotFound, Unavailable
from llmserve.frontends.shared.request_context import current_request
from llmserve.frontends.shared.server_core import Core, single_response
from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.answers.failures import ModelNotFound, Refused
from llmserve.serving.signature import datatype_name
from llmserve.serving.types import NUMPY_DTYPES, InferRequest, Tensor

TEXT_IN, TEXT_OUT = "text_input", "text_output"
WORD_LISTS = ("bad_words", "stop_words")  # the oldest ensembles require them, even if empty
OTHER_NAMES = {"seed": "random_seed", "min_tokens": "min_length"}  # names of inputs in older ensembles
FIELDS = {  # inputs whose name differs from the API's field
    "stop_words": "stop", "num_return_sequences": "n", "logit_bias_ids": "logit_bias", "end_id": "ignore_eos",
    "logit_bias_weights": "logit_bias", "return_log_probs": "logprobs", "num_top_log_probs": "top_logprobs",
    "return_tokens": "logprobs", "return_prompt_log_probs": "echo", "prompt_ids": "prompt",
    "guided_decoding_guide": "response_format", "guided_decoding_guide_type": "response_format",
}  # fmt: skip
Values = Mapping[str, Sequence[Any]]
NUM_DIGITS = 12  # of a digest, in a fingerprint


class Named(Protocol):
    """A request that names a model."""

    model: str


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of an ensemble, by its output for a text."""

    output: str
    does: str
    path: str  # of the API for it

    @property
    def other(self) -> Kind:
        return VECTORS if self is TEXTS else TEXTS


TEXTS = Kind(TEXT_OUT, "answers text with text", "/v1/chat/completions or /v1/completions")
VECTORS = Kind("embedding", "makes embeddings or scores of texts", "/v1/embeddings or /v1/rerank")


@dataclass(frozen=True, slots=True)
class Ensemble:
    """An ensemble of the text APIs, as described by its config."""

    name: str
    config: ModelConfig
    inputs: Mapping[str, ModelInput]
    outputs: frozenset[str]
    encoder: str  # model of the step that reads the text
    decoder: str  # model of the step that writes the output
    adapter: str = ""  # name of the adapter; clients see it as a separate model

    @property
    def takes_messages(self) -> bool:
        return "messages" in self.inputs

    def tensors(self, values: Values) -> dict[str, Tensor]:
        """The inputs of a request. Raises `Refused`, naming the API's fields that the ensemble has no inputs for."""
        named = {self._own_name(name): value for name, value in values.items()}
        if missing := [name for name in named if name not in self.inputs]:
            fields = ", ".join(dict.fromkeys(FIELDS.get(name, name) for name in missing))
            raise Refused(
                f"model '{self.name}' does not support {fields}: its ensemble has no input {', '.join(missing)}",
                FIELDS.get(missing[0], missing[0]),
            )
        for name in WORD_LISTS:
            if name in self.inputs and not self.inputs[name].optional:
                named.setdefault(name, [""])
        return {name: self._tensor(name, value) for name, value in named.items()}

    def _own_name(self, name: str) -> str:
        other = OTHER_NAMES.get(name, name)
        return other if name not in self.inputs and other in self.inputs else name

    def _tensor(self, name: str, values: Sequence[Any]) -> Tensor:
        datatype = datatype_name(self.inputs[name].data_type)
        shape = (1, len(values)) if self.config.max_batch_size > 0 else (len(values),)
        return tensor_of(name, datatype, values, shape)


def tensor_of(name: str, datatype: str, values: Sequence[Any], shape: tuple[int, ...]) -> Tensor:
    """A tensor of `values`. Raises `Refused` for a number that the type cannot hold."""
    if datatype == "BYTES":
        data = np.empty(len(values), np.object_)
        data[:] = [text.encode() for text in values]
        return Tensor(name, datatype, data.reshape(shape))
    try:
        return Tensor(name, datatype, np.array(values, NUMPY_DTYPES[datatype]).reshape(shape))
    except OverflowError as error:
        field = FIELDS.get(name, name)
        raise Refused(f"{field}: a number is out of range for {datatype}", field) from error


def _ensemble_of(config: ModelConfig, text_out: str) -> Ensemble | None:
    """The ensemble with this config; None for another kind of model."""
    inputs = {entry.name: entry for entry in config.input}
    outputs = frozenset(entry.name for entry in config.output)
    if TEXT_IN not in inputs or text_out not in outputs:
        return None
    steps = config.ensemble_scheduling.step
    readers = [step.model_name for step in steps if TEXT_IN in step.input_map.values()]
    writers = [step.model_name for step in steps if text_out in step.output_map.values()]
    if not readers or not writers:
        return None
    return Ensemble(config.name, config, inputs, outputs, readers[0], writers[0])


class Ensembles:
    def __init__(self, core: Core, settings: TextSettings, kind: Kind | None = None) -> None:
        self.core = core
        self.kind = kind or TEXTS
        self._settings = settings
        self._known: dict[str, Ensemble | None] = {}
        self._ends: dict[str, tuple[object, bool]] = {}  # by ensemble: its encoder's config, and `has_end`
        self._configs: dict[str, ModelConfig] = {}  # configs that `_known` was made from

    def names(self) -> Iterator[str]:
        """The names of all loaded ensembles of this kind, sorted."""
        for name in sorted({row.name for row in self.core.repository_index(ready=True)}):
            try:
                if self._look(name) is not None:
                    yield name
            except LlmserveError:
                continue  # unloaded in the meantime

    def listed(self) -> list[str]:
        """The names that clients see, without adapters."""
        names = list(self.names())
        return list(self._served_names) or names if len(names) == 1 else names

    @property
    def _served_names(self) -> Sequence[str]:
        """The operator's names. If a language model is loaded, they belong to it and not to a model for vectors."""
        names = self._settings.served_names
        return () if names and self.kind is VECTORS and self.others() else names

    def named(self, body: Named) -> Ensemble:
        """The ensemble for a request. Sets the request's model to the name that the answer reports."""
        ensemble = self.find(body.model)
        known = (*self._settings.served_names, ensemble.name)
        if not ensemble.adapter and body.model not in known:
            body.model = known[0]
        return ensemble

    def find(self, name: str) -> Ensemble:
        """Without a name, the only ensemble. Raises `ModelNotFound`, or `Unavailable` before and after serving."""
        if not name:
            return self.only()
        try:
            found = self._look(name)
        except (NotFound, InvalidArgument):
            found = self._with_adapter(name)
        if found is None and (self._settings.takes_any_name or name in self._served_names):
            names = list(self.names())
            found = self._look(names[0]) if len(names) == 1 else None
        if found is None:
            known = ", ".join([*self.listed(), *self.adapters()]) or "none"
            raise self._refusal(name, f"Known: {known}")
        return found

    @property
    def template_values(self) -> Mapping[str, Any]:
        """More variables for chat templates, which a request may override."""
        return self._settings.template_values

    def has(self, name: str) -> bool:
        """Whether an ensemble, not an adapter, has this name."""
        return name in {*self.listed(), *self.names()}

    def adapters(self) -> dict[str, str]:
        """The adapters that the request's key may use: their names, and the names of their ensembles."""
        found = {adapter: name for name in self.names() for adapter in self.core.adapters(name)}
        context = current_request()
        owner = None if context is None or not found else context.owner
        if owner is None or owner.is_admin or owner.tenant.adapters is None:  # administrators see all
            return found
        return {adapter: name for adapter, name in found.items() if adapter in owner.tenant.adapters}

    def _with_adapter(self, name: str) -> Ensemble | None:
        ensemble = self.adapters().get(name)
        found = None if ensemble is None else self._look(ensemble)
        return None if found is None else replace(found, adapter=name)

    def only(self) -> Ensemble:
        """The ensemble for requests that name no model. Raises `Refused` unless exactly one is loaded."""
        names = list(self.names())
        if not names and not self.core.ready():
            raise Unavailable("the server is starting or stopping: no model is ready")
        if not names and self.others():
            raise self._refusal(self.others()[0])
        if not names:
            raise Refused(f"no model that {self.kind.does} is loaded; /v2/repository/index lists all", "model")
        if len(names) != 1:
            raise Refused(f"the request must name a model. Available: {', '.join(names)}", "model")
        return self.find(names[0])

    def others(self) -> list[str]:
        """The names of ensembles of the other kind."""
        return list(Ensembles(self.core, self._settings, self.kind.other).names())

    def _refusal(self, name: str, known: str = "") -> Refused:
        if name in self.others():
            other = self.kind.other
            return Refused(f"model '{name}' {other.does}; use {other.path}", "model")
        problem = f"The model '{name}' does not exist, or is not one that {self.kind.does}. {known}"
        return ModelNotFound(problem, "model", "model_not_found")

    def fingerprint(self, ensemble: Ensemble) -> str | None:
        """The first digits of the digests of the engine and its adapter; None if the engine's digest is unknown."""
        digest = self.core.facts(ensemble.name).get("digest")
        if not digest or not ensemble.adapter:
            return f"fp_{digest[:NUM_DIGITS]}" if digest else None
        of_adapter = self.core.adapters(ensemble.name).get(ensemble.adapter, {}).get("digest", "")
        return f"fp_{digest[:NUM_DIGITS]}_{of_adapter[:NUM_DIGITS]}"

    def _look(self, name: str) -> Ensemble | None:
        config = self.core.model_config(name)
        if self._configs.get(name) is not config:  # reloaded
            self._configs[name], self._known[name] = config, _ensemble_of(config, self.kind.output)
        return self._known[name]

    async def prompt_ids(self, ensemble: Ensemble, values: Values) -> list[int]:
        """The token ids that the ensemble's first step makes from a prompt. `values`: inputs of the ensemble."""
        return _values(await self._prepared(ensemble, values), "INPUT_ID")

    async def num_ids(self, ensemble: Ensemble, values: Values) -> int:
        return len(await self.prompt_ids(ensemble, values))

    async def text_ids(self, ensemble: Ensemble, text: str) -> list[int]:
        """The ids of a text, without special tokens if the ensemble supports this."""
        more = {"add_special_tokens": [False]} if "add_special_tokens" in ensemble.inputs else {}
        return await self.prompt_ids(ensemble, {"text_input": [text], **more}) if text else []

    async def num_tokens(self, ensemble: Ensemble, text: str) -> int:
        return len(await self.text_ids(ensemble, text))

    async def chat_style(self, ensemble: Ensemble, template_values: Mapping[str, Any]) -> str:
        """The chat style that parses answers, as JSON, from the ensemble's first step."""
        tensors = [
            tensor_of("REQUEST_OUTPUT_LEN", "INT32", [1], (1, 1)),
            tensor_of("RETURN_CHAT_STYLE", "BOOL", [True], (1, 1)),
            tensor_of("CHAT_TEMPLATE_KWARGS", "BYTES", [json.dumps(template_values)], (1, 1)),
        ]
        request = InferRequest(
            ensemble.encoder, {tensor.name: tensor for tensor in tensors}, requested_outputs=("CHAT_STYLE",)
        )
        text: bytes = _values(await self._ask(request), "CHAT_STYLE")[0]
        return text.decode()

    async def has_end(self, ensemble: Ensemble) -> bool:
        """Whether a token ends answers; requested once per config. True if unknown."""
        config = self.core.model_config(ensemble.encoder)
        made_for, found = self._ends.get(ensemble.name, (None, True))
        if made_for is not config:
            try:
                found = (await self.end_ids(ensemble))[0] >= 0
            except InvalidArgument:
                found = True
            self._ends[ensemble.name] = config, found
        return found

    async def end_ids(self, ensemble: Ensemble) -> tuple[int, int]:
        """The ids that end and pad an answer; -1: none."""
        outputs = await self._prepared(ensemble, {"text_input": ["x"]})
        return _values(outputs, "OUT_END_ID")[0], _values(outputs, "OUT_PAD_ID")[0]

    async def _prepared(self, ensemble: Ensemble, values: Values) -> Mapping[str, Tensor]:
        given = ensemble.tensors({"max_tokens": [1], **values} if self.kind is TEXTS else values)
        step = next(step for step in ensemble.config.ensemble_scheduling.step if step.model_name == ensemble.encoder)
        renamed = {
            name: Tensor(name, given[source].datatype, given[source].data)
            for name, source in step.input_map.items()
            if source in given
        }
        outputs = ("INPUT_ID", *(("OUT_END_ID", "OUT_PAD_ID") if self.kind is TEXTS else ()))
        return await self._ask(InferRequest(ensemble.encoder, renamed, requested_outputs=outputs))

    async def text_of(self, ensemble: Ensemble, ids: Sequence[int], *, with_special: bool = False) -> str:
        """The text that the ensemble's last step makes from ids."""
        with_special = with_special and self.reads(ensemble, "SKIP_SPECIAL_TOKENS")
        texts = _values(await self._ask(_decoding(ensemble, ids, "OUTPUT", with_special=with_special)), "OUTPUT")
        text: bytes = texts[0]
        return text.decode("utf-8", "replace")

    async def bytes_of(self, ensemble: Ensemble, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id on its own."""
        if not self.reads(ensemble, "RETURN_TOKENS"):
            raise Refused(
                f"model '{ensemble.name}' cannot return single tokens: '{ensemble.decoder}' has no input RETURN_TOKENS",
                "logprobs",
            )
        return _values(await self._ask(_decoding(ensemble, ids, "TOKEN_BYTES")), "TOKEN_BYTES")

    def reads(self, ensemble: Ensemble, name: str) -> bool:
        """Whether the ensemble's last step has this input; older ones lack some."""
        return any(entry.name == name for entry in self.core.model_config(ensemble.decoder).input)

    async def _ask(self, request: InferRequest) -> Mapping[str, Tensor]:
        response = await single_response(self.core, request)
        if response.error is not None:
            raise response.error
        return {tensor.name: tensor for tensor in response.outputs}


def _decoding(ensemble: Ensemble, ids: Sequence[int], output: str, *, with_special: bool = False) -> InferRequest:
    tensors = [
        tensor_of("TOKENS_BATCH", "INT32", ids, (1, 1, len(ids))),
        tensor_of("SEQUENCE_LENGTH", "INT32", [len(ids)], (1, 1)),
    ]
    if output == "TOKEN_BYTES":
        tensors.append(tensor_of("RETURN_TOKENS", "BOOL", [True], (1, 1)))
    if with_special:
        tensors.append(tensor_of("SKIP_SPECIAL_TOKENS", "BOOL", [False], (1, 1)))
    return InferRequest(ensemble.decoder, {tensor.name: tensor for tensor in tensors}, requested_outputs=(output,))


def _values(outputs: Mapping[str, Tensor], name: str) -> list[Any]:
    if name not in outputs:
        raise InvalidArgument(f"the model's response lacks {name}")
    values: list[Any] = outputs[name].data.reshape(-1).tolist()
    return values
