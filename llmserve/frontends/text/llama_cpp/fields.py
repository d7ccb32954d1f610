"""The fields of a request to llama.cpp's POST /completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from llmserve.frontends.text.answers.generation import Sampling
from llmserve.frontends.text.answers.log_probs import log_prob_values
from llmserve.frontends.text.requests.fields import (
    MAX_BIASES,
    MAX_PROMPTS,
    MAX_TOKENS,
    MAX_TOP,
    MINUS_ONE_IS_NONE,
    ModelName,
    Sampled,
    Seed,
)
from llmserve.frontends.text.requests.validation import at_most, ignored, refused

Item: TypeAlias = str | int  # of a prompt: a text, or a token
MAX_ITEMS = 128 * 1024  # of all prompts
TEXT, MEDIA = "prompt_string", "multimodal_data"
SAMPLER = "this sampler is not supported"
NOT_HERE = "it has no effect on this server"


class NativeRequest(Sampled):
    """The sampling fields of /v1/completions, also under llama.cpp's names and forms."""

    model: ModelName = ""
    prompt: JsonValue = Field(description="A text, token ids, a mix of both, or a list of these.")
    n_predict: Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, MINUS_ONE_IS_NONE] = None
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None, MINUS_ONE_IS_NONE] = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP)] = Field(0, description="Alternatives per token.")
    repeat_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = Field(None, description="As repetition_penalty.")
    seed: Seed = Field(None, description="The same seed returns the same answer.")
    logit_bias: Annotated[Any, BeforeValidator(lambda value: value)] = None  # see `_has_biases`
    return_tokens: bool | None = Field(None, description="Return the answer's token ids.")
    response_fields: Annotated[list[str], at_most(64)] | None = Field(None, description="Fields to return.")
    post_sampling_probs: Annotated[Any, refused("only log probs before sampling are supported", False)] = None
    n: Annotated[Any, refused("send several prompts", 1)] = Field(None, description="Not supported.")
    stream_options: Annotated[Any, ignored(NOT_HERE)] = Field(None, description="No effect.")
    mirostat: Annotated[Any, refused(SAMPLER, 0)] = Field(None, description="Not supported.")
    typical_p: Annotated[Any, refused(SAMPLER, 1)] = Field(None, description="Not supported.")
    xtc_probability: Annotated[Any, refused(SAMPLER, 0)] = Field(None, description="Not supported.")
    dry_multiplier: Annotated[Any, refused(SAMPLER, 0)] = Field(None, description="Not supported.")
    dynatemp_range: Annotated[Any, refused(SAMPLER, 0)] = Field(None, description="Not supported.")
    top_n_sigma: Annotated[Any, refused(SAMPLER, 0, -1)] = Field(None, description="Not supported.")
    samplers: Annotated[Any, ignored("the order of samplers is fixed")] = Field(None, description="No effect.")
    repeat_last_n: Annotated[Any, ignored("penalties apply to the whole text", -1)] = None
    cache_prompt: bool | None = Field(None, description="No effect: the prefix cache is automatic.")
    id_slot: Annotated[Any, ignored("slots are not supported", -1)] = Field(None, description="No effect.")
    n_keep: Annotated[Any, ignored(NOT_HERE, 0)] = Field(None, description="No effect.")
    return_progress: Annotated[Any, ignored("progress is not reported", False)] = Field(None, description="No effect.")

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if not all(self.prompts()) or not self.prompts():
            raise ValueError("prompt must not be empty")
        if self.stream and len(self.prompts()) > 1:
            raise ValueError("several prompts cannot be streamed")
        return self

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _has_biases(cls, value: Any) -> Any:
        """Pairs of a token id or a text, and its bias (false: never generate it)."""
        pairs = list(value.items()) if isinstance(value, dict) else value
        if pairs is None:
            return None
        if isinstance(pairs, list) and len(pairs) > MAX_BIASES:
            raise ValueError(f"has {len(pairs)} entries, more than {MAX_BIASES}")
        if not isinstance(pairs, list) or not all(map(_is_bias, pairs)):
            raise ValueError("expected pairs of a token id or string, and a number from -100 to 100 or false")
        return [[_token(key), -100.0 if bias is False else float(bias)] for key, bias in pairs]

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_ids(cls, value: Any) -> Any:
        """Also accepts texts, which are tokenized when the ensemble is known."""
        return value

    def prompts(self) -> list[list[Item]]:
        """The prompts, each a sequence of texts and tokens. Raises `ValueError` for an invalid prompt."""
        given = self.prompt
        several = given if isinstance(given, list) and not any(type(each) is int for each in given) else [given]
        if len(several) > MAX_PROMPTS:
            raise ValueError(f"there are {len(several)} prompts, more than {MAX_PROMPTS}")
        listed = [_listed(each) for each in several]
        if (count := sum(map(len, listed))) > MAX_ITEMS:
            raise ValueError(f"there are {count} texts and tokens, more than {MAX_ITEMS}")
        return [[*_items(each)] for each in listed]

    def asked(self, prompt_biases: Mapping[int, float]) -> Sampling:
        """The sampling settings. `prompt_biases`: logit biases by token."""
        limit = self._limit
        more: dict[str, Sequence[Any]] = (
            {**log_prob_values(self.n_probs)} if self.n_probs else {"return_tokens": [True]}
        )
        if prompt_biases:
            more |= {"logit_bias_ids": [*prompt_biases], "logit_bias_weights": [*prompt_biases.values()]}
        plain = self.model_copy(update={"logit_bias": None, "timings_per_token": True})
        if self.repeat_penalty is not None:
            plain.repetition_penalty = self.repeat_penalty
        return plain.sampling(None if limit is None else max(limit, 1), 1, more)

    @property
    def says_nothing(self) -> bool:
        """Whether the prompt is only computed, for later requests."""
        return self._limit == 0

    @property
    def _limit(self) -> int | None:
        return self.n_predict if self.n_predict is not None else self.max_tokens

    def settings(self, sampling: Sampling) -> dict[str, JsonValue]:
        """The effective settings of an answer, under llama.cpp's names."""
        return {
            "n_predict": 0 if self.says_nothing else sampling.max_tokens or -1, "seed": sampling.seed,
            "temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p,
            "min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
            "stop": list(sampling.stop), "n_probs": self.n_probs, "stream": bool(self.stream),
            "ignore_eos": bool(self.ignore_eos), "grammar": self.grammar or "",
        }  # fmt: skip


def _listed(prompt: JsonValue) -> list[JsonValue]:
    if isinstance(prompt, dict):
        if prompt.get(MEDIA):
            raise ValueError(f"{MEDIA}: only text is supported")
        prompt = prompt.get(TEXT)
    return prompt if isinstance(prompt, list) else [prompt]


def _items(listed: Sequence[JsonValue]) -> Iterator[Item]:
    for each in listed:
        if not (isinstance(each, str) or (type(each) is int and 0 <= each < 2**31)):
            raise ValueError("a prompt must be a string, token ids, a list of both, or {prompt_string}")
        yield each


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    key, bias = pair
    return type(key) in (str, int) and (bias is False or (type(bias) in (int, float) and -100 <= bias <= 100))


def _token(key: str | int) -> Item:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
