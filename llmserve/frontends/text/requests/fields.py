"""Fields that several requests share, and their conversion to inputs of an ensemble."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, field_validator, model_validator

from llmserve.frontends.shared.text_settings import TextSettings
from llmserve.frontends.text.answers.generation import NO_END, Sampling
from llmserve.frontends.text.requests.ensembles import Values
from llmserve.frontends.text.requests.formats import Formatted, guide_values
from llmserve.frontends.text.requests.validation import Strict, at_most, ignored, problems_of, refused

MAX_STOPS = 32
MAX_ANSWERS = 128  # to one prompt: the engine's limit
MAX_TOP = 20  # alternatives of a token
MAX_CHOSEN = 128  # tokens of logprob_token_ids
MAX_ALLOWED = 8192  # tokens of allowed_token_ids
MAX_TOKENS = 2**31 - 1
MAX_BIASES = 64 * 1024  # tokens of logit_bias
MAX_LABELS = 64
MAX_PROMPTS = 2048  # of one request
MAX_MESSAGES = 16 * 1024  # of a conversation, and parts of one message

StopText: TypeAlias = Annotated[str, Field(min_length=1)]
Stops: TypeAlias = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None
MINUS_ONE_IS_NONE = BeforeValidator(lambda value: None if value == -1 else value)  # as llama.cpp's clients send it
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seed: TypeAlias = Annotated[Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None, MINUS_ONE_IS_NONE]
Limit: TypeAlias = Annotated[Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None, MINUS_ONE_IS_NONE]
Labels: TypeAlias = Annotated[dict[str, str], at_most(MAX_LABELS)]
ModelName: TypeAlias = Annotated[
    str,
    BeforeValidator(lambda name: "" if name is None else name),
    Field(description="Required if the server has several models."),
]
TemplateValues: TypeAlias = Annotated[dict[str, JsonValue], Field(description="Extra variables for the chat template.")]
Speculates: TypeAlias = Annotated[
    bool | None, Field(description="false turns speculative decoding off. The answer is the same.")
]


def speculation_values(speculates: bool | None) -> Values:
    return {"speculation": [False]} if speculates is False else {}


def _few(names: Sequence[str]) -> str:
    return ", ".join(name[:20] for name in names[:5])


def stop_list(stop: str | Sequence[str] | None) -> list[str]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)


class StreamOptions(Strict):
    include_usage: bool | None = Field(False, description="The last chunk reports the usage.")
    include_obfuscation: Annotated[Any, ignored("padding is not supported", False)] = None
    continuous_usage_stats: bool | None = Field(None, description="Every chunk reports the usage so far.")


class TransferredPrompt(Strict):
    """Added by a router that has already tokenized the prompt."""

    prompt_token_ids: Annotated[list[TokenId] | None, Field(min_length=1, description="The prompt's ids.")] = None


class Sampled(Formatted):
    """The sampling fields of OpenAI's completions and chats, with vLLM's additions."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0: the likeliest tokens.")
    top_p: Annotated[float | None, Field(gt=0, le=1, description="Total probability of tokens to sample from.")] = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 or -1: every token.")] | None = None
    min_p: Annotated[float | None, Field(ge=0, le=1, description="Minimum, relative to the likeliest token.")] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2, description="For tokens in the text.")] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2, description="Per occurrence of a token.")] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=1e6, description="Above 1: fewer repetitions.")] = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_BIASES)] | None = Field(
        None, description="What to add to the logits of tokens, by token id."
    )
    seed: Seed = Field(None, description="The same seed returns the same answer.")
    stop: Stops = Field(None, description="Texts that end the answer; they are not part of it.")
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=MAX_STOPS, description="End the answer.")] = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Words that must not appear in the answer."
    )
    use_beam_search: Annotated[Any, refused("beam search is not supported", False)] = None
    include_stop_str_in_output: bool | None = Field(None, description="The answer includes the stop text.")
    min_tokens: Annotated[int | None, Field(ge=0, le=MAX_TOKENS, description="Minimum length of the answer.")] = None
    ignore_eos: bool | None = Field(None, description="Do not stop at end tokens.")
    skip_special_tokens: bool | None = Field(None, description="false: the answer includes them as text.")
    spaces_between_special_tokens: Annotated[Any, ignored("the tokenizer decides where spaces go", True)] = None
    return_token_ids: bool | None = Field(None, description="Return the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="Log probs name tokens as token_id:ID.")
    prompt_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP, description="Alternatives per prompt token.")] = None
    logprob_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_CHOSEN)] | None = Field(
        None, description="Report log probs of these tokens, and of the generated one, instead of the likeliest."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED)] | None = Field(
        None, description="The only tokens that may be generated. Include the end token to let the answer end."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        None, description="Maximum prompt length in tokens. Drops the first ones unless truncation_side is right."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The end of the prompt to shorten.")
    kv_transfer_params: TransferredPrompt | None = Field(None, description="A prompt in token ids, from a router.")
    timings_per_token: bool | None = Field(None, description="As in llama.cpp: the end of the answer includes timings.")
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = Field(None, description="Number of answers.")
    stream: bool | None = Field(None, description="Send the answer in pieces, as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    user: str | None = Field(None, description="A label; it has no effect.")
    speculation: Speculates = None
    return_receipt: bool | None = Field(
        None, description="Each choice gets a receipt, from which `llmserve verify` reproduces the answer."
    )

    @model_validator(mode="after")
    def _can_be_told(self) -> Self:
        if self.include_stop_str_in_output and (self.n or 1) > 1:
            raise ValueError("include_stop_str_in_output requires n = 1")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs cannot be streamed")
        if self.logprob_token_ids and self.prompt_logprobs:
            raise ValueError("logprob_token_ids and prompt_logprobs cannot be combined: leave one out")
        if self.allowed_token_ids and self.says_format:
            raise ValueError("allowed_token_ids and a format both set the format of the answer: give only one")
        return self

    def as_operator_has_it(self, settings: TextSettings) -> None:
        """Apply the server's flags to the request."""
        if settings.forces_usage and self.stream:
            self.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        if settings.names_tokens_by_id and self.return_tokens_as_token_ids is None:
            self.return_tokens_as_token_ids = True

    @field_validator("stop", mode="before")
    @classmethod
    def _stops_somewhere(cls, value: Any) -> Any:
        """Remove empty texts, which many clients send: they do not end an answer."""
        if value == "":
            return None
        return [each for each in value if each != ""] if isinstance(value, list) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _has_biases(cls, value: Any) -> Any:
        """Report one problem for all invalid biases."""
        if not isinstance(value, dict):
            return value
        wrong = [key for key, bias in value.items() if type(bias) not in (int, float) or not -100 <= bias <= 100]
        if wrong:
            raise ValueError(f"biases must be numbers from -100 to 100; {len(wrong)} are not: {_few(wrong)}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if wrong := [key for key in value or {} if not (key.isascii() and key.isdigit() and len(key) < 10)]:
            raise ValueError(f"keys must be token ids, got {_few(wrong)}")
        return value

    def sampling(self, max_tokens: int | None, num_answers: int, more: Values) -> Sampling:
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k is None else max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            num_answers=num_answers,
            stop=stop_list(self.stop),
            more={**self._more(), **self.format_values(), **more},
            shows_stop=bool(self.include_stop_str_in_output),
            wants_times=bool(self.timings_per_token),
            scored_ids=tuple(self.logprob_token_ids or ()),
        )

    def _more(self) -> Values:
        """More inputs of the ensemble, without those that equal its defaults."""
        values: dict[str, Sequence[Any]] = {}
        for name in ("presence_penalty", "frequency_penalty", "min_tokens"):
            if value := getattr(self, name):
                values[name] = [value]
        for name in ("return_receipt", "stop_token_ids", "bad_words"):
            if value := getattr(self, name):
                values[name] = value if isinstance(value, list) else [value]
        if self.return_token_ids or self.tells_usage:
            values["return_tokens"] = [True]
        if self.skip_special_tokens is False:
            values["skip_special_tokens"] = [False]
        if self.logprob_token_ids:
            values["return_generation_logits"] = [True]
        if self.allowed_token_ids:
            values |= guide_values("token_ids", json.dumps(sorted({*self.allowed_token_ids}), separators=(",", ":")))
        values |= speculation_values(self.speculation)
        if self.ignore_eos:
            values["end_id"] = [NO_END]
        if self.logit_bias:
            values["logit_bias_ids"] = [int(key) for key in self.logit_bias]
            values["logit_bias_weights"] = list(self.logit_bias.values())
        return values

    def num_told(self, num_top: int | None) -> int:
        """The number of alternatives to return for a token, if `num_top` of the likeliest are requested."""
        return MAX_CHOSEN if self.logprob_token_ids else num_top or 0

    @property
    def tells_tokens(self) -> bool:
        """Whether the reply needs outputs of tokens for other reasons than log probs."""
        return bool(self.return_token_ids) or self.tells_usage or self.prompt_logprobs is not None

    @property
    def tells_usage(self) -> bool:
        """Whether every chunk reports the usage."""
        return self.wants_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def sampling_problems(given: Mapping[str, Any]) -> list[str]:
    """The problems of the operator's sampling defaults."""
    try:
        Sampled.model_validate(given)
    except ValidationError as error:
        return problems_of(error, Sampled)
    return []
