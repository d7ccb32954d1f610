from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llmserve.backends.tensorrtllm.request_tensors import UNSUPPORTED_INPUTS, TensorRequest, is_stop, read_request
from llmserve.core import BeamSearch, SamplingParams
from llmserve.errors import InvalidArgument, Unsupported
from llmserve.serving.types import Tensor
from llmserve.stages.guides import GuideKind, GuideText
from tests.backends.tensorrtllm.models import tensors


def read(*, max_beam_width: int = 1, vocab_sizes: Any = frozenset({6, 8}), **values: Any) -> TensorRequest:
    given = {"input_ids": [3, 4, 5], "input_lengths": 3, "request_output_len": 7, **values}
    inputs = tensors({name: value for name, value in given.items() if value is not None and not is_array(value)})
    inputs |= {name: Tensor(name, "INT32", value) for name, value in given.items() if is_array(value)}
    return read_request(
        inputs, request_id="r", max_seq_len=100, vocab_sizes=vocab_sizes, excludes_input=False,
        max_beam_width=max_beam_width,
    )  # fmt: skip


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def test_the_least_that_a_client_sends() -> None:
    job = read()
    assert job.generate.prompt_ids == (3, 4, 5)
    assert job.generate.sampling == SamplingParams(max_tokens=7, top_k=1)
    assert (job.generate.end_id, job.generate.num_sequences, job.streaming, job.excludes_input) == (
        None,
        1,
        False,
        False,
    )


@pytest.mark.parametrize("names", [("min_tokens", "seed"), ("min_length", "random_seed")])
def test_both_generations_names(names: tuple[str, str]) -> None:
    sampling = read(**{names[0]: 3, names[1]: 11}).generate.sampling
    assert (sampling.min_tokens, sampling.seed) == (3, 11)


def test_the_same_setting_given_twice_must_agree() -> None:
    assert read(min_tokens=3, min_length=3).generate.sampling.min_tokens == 3
    with pytest.raises(InvalidArgument, match="min_tokens and min_length"):
        read(min_tokens=3, min_length=4)


@pytest.mark.parametrize(
    ("given", "greedy"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"runtime_top_k": 0, "runtime_top_p": 0.0}, True),
        ({"runtime_top_k": 1, "runtime_top_p": 0.5}, True),
        ({"runtime_top_k": 5, "temperature": 0.0}, True),
        ({"runtime_top_k": 5}, False),
        ({"runtime_top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"min_p": 0.1, "temperature": 0.0}, True),
        ({"min_p": 0.0, "temperature": 0.7}, True),
    ],
)
def test_greedy_unless_top_k_top_p_or_min_p_says_otherwise(given: dict[str, Any], greedy: bool) -> None:
    assert read(**given).generate.sampling.is_greedy is greedy


def test_top_p_zero_switches_it_off() -> None:
    sampling = read(runtime_top_k=5, runtime_top_p=0.0).generate.sampling
    assert (sampling.top_k, sampling.top_p) == (5, 1.0)


def test_everything_else_finds_its_place() -> None:
    job = read(
        temperature=0.5, runtime_top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5,
        frequency_penalty=0.25, end_id=2, pad_id=0, return_log_probs=True, num_return_sequences=3, streaming=True,
        exclude_input_in_output=True, beam_width=1, len_penalty=2.0, early_stopping=True, return_perf_metrics=True,
        stop_words=[b"END", b""], stop_words_list=np.array([[[8, 9, 7], [2, 3, -1]]]),
        bad_words_list=np.array([[6], [1]]),
    )  # fmt: skip
    assert job.generate.sampling == SamplingParams(7, 0, 0.5, 0, 0.75, 0.25, 1.5, -0.5, 0.25)
    assert (job.generate.end_id, job.generate.num_sequences, job.generate.return_log_probs) == (2, 3, True)
    assert (job.generate.stop_ids, job.generate.bad_ids) == (((8, 9), (7,)), ((6,),))
    assert (job.stop_strings, job.streaming, job.excludes_input) == (("END",), True, True)


def test_end_id_minus_one_never_stops() -> None:
    assert read(end_id=-1).generate.end_id is None
    assert read(end_id=0).generate.end_id == 0


def test_the_dense_bias_becomes_the_values_that_matter() -> None:
    bias = [0.0] * 6
    bias[4] = -1.5
    for padding in ([], [0.0, 0.0]):
        assert read(embedding_bias=bias + padding).generate.embedding_bias == ((4, -1.5),)
    assert read(embedding_bias=[0.0]).generate.embedding_bias == ()
    assert read(embedding_bias=[0.0, 2.0], vocab_sizes=frozenset()).generate.embedding_bias == ((1, 2.0),)


def test_the_prompt_is_cut_to_its_length_and_may_lack_the_batch_dimension() -> None:
    assert read(input_lengths=2).generate.prompt_ids == (3, 4)
    assert read(input_ids=np.array([7, 8], np.int32), input_lengths=np.array([2])).generate.prompt_ids == (7, 8)


def test_the_clients_own_drafts() -> None:
    assert read().generate.draft_ids == ()
    assert read(draft_input_ids=[5, 6, 7]).generate.draft_ids == (5, 6, 7)
    assert read(draft_input_ids=[5, 6, 7], num_draft_tokens=2).generate.draft_ids == (5, 6)
    assert read(draft_input_ids=[5, 6, 7], num_draft_tokens=0).generate.draft_ids == ()


def test_empty_tensors_count_as_absent() -> None:
    empty = np.zeros((1, 0), np.int32)
    job = read(draft_input_ids=empty, stop_words_list=np.zeros((1, 2, 0), np.int32), embedding_bias=empty)
    assert (job.generate.stop_ids, job.generate.embedding_bias) == ((), ())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": [], "input_lengths": 0}, "prompt is empty"),
        ({"input_ids": None, "input_lengths": None}, "prompt is empty"),
        ({"input_ids": [1] * 100, "input_lengths": 100}, "too long: it has 100 tokens.* at most 99"),
        ({"input_lengths": 4}, "input_lengths is 4"),
        ({"input_ids": np.ones((2, 2), np.int32)}, r"batch of one.*\[2, 2\]"),
        ({"request_output_len": 0}, r"request_output_len \(max_tokens\) must be at least 1, got 0"),
        ({"request_output_len": -3}, "max_tokens"),
        ({"request_output_len": None}, "max_tokens"),
        ({"request_output_len": [3, 4]}, "one value"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"runtime_top_p": 1.5}, "runtime_top_p"),
        ({"runtime_top_k": -1}, "runtime_top_k"),
        ({"beam_width": 4}, "beam_width must be 1 .* got 4"),
        ({"beam_width": 0}, "beam_width"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"stop_words": [b"\xff"]}, "stop_words is not valid UTF-8"),
        ({"bad_words_list": np.array([[1, 2], [2, 1]])}, "bad_words_list"),
        ({"embedding_bias": [math.inf] * 6}, "embedding_bias"),
        ({"embedding_bias": [1.0]}, "embedding_bias must have one value for each token .*: 6 or 8, got 1"),
        ({"embedding_bias": [0.0] * 7}, "6 or 8, got 7"),
        ({"num_draft_tokens": 1}, "num_draft_tokens must be from 0 to 0, the number of draft_input_ids, got 1"),
        ({"draft_input_ids": [5, 6], "num_draft_tokens": -1}, "num_draft_tokens must be from 0 to 2, .* got -1"),
    ],
)
def test_bad_values_are_explained(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read(**given)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(InvalidArgument, match=r"(?s)4 problems.*temperature.*max_tokens.*beam_width.*lora_config"):
        read(request_output_len=0, temperature=math.nan, beam_width=2, lora_config=1)


@pytest.mark.parametrize("name", UNSUPPORTED_INPUTS)
def test_what_is_not_supported_is_named(name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        read(**{name: 1})


def test_what_preprocessing_makes_of_no_text_for_a_decoder_is_ignored() -> None:
    """Published preprocessing sends the id of padding with every request."""
    read(decoder_input_ids=[0], decoder_input_lengths=1)
    with pytest.raises(Unsupported, match="decoder_input_ids"):
        read(decoder_input_ids=[5, 6], decoder_input_lengths=2)


def test_what_may_be_asked_about_the_distribution() -> None:
    plain = read(return_context_logits=False, num_top_log_probs=0).generate
    assert not any((plain.scores_prompt, plain.return_generation_logits, plain.num_top_log_probs))
    asked = read(
        return_context_logits=True, return_generation_logits=True, num_top_log_probs=5, return_prompt_log_probs=True
    ).generate
    assert (asked.return_context_logits, asked.return_generation_logits) == (True, True)
    assert (asked.num_top_log_probs, asked.return_prompt_log_probs) == (5, True)


def test_guides_by_tensorrt_llms_names() -> None:
    assert read().guide is None
    schema = '{"type": "object"}'
    given = read(guided_decoding_guide_type=[b"json_schema"], guided_decoding_guide=[schema.encode()])
    assert given.guide == GuideText(GuideKind.JSON_SCHEMA, schema)
    assert read(guided_decoding_guide_type=[b"json"]).guide == GuideText(GuideKind.JSON)
    given = read(guided_decoding_guide_type=[b"json"], guided_decoding_guide=[b"x"])
    assert given.guide == GuideText(GuideKind.JSON)
    assert read(guided_decoding_guide_type=[b""], guided_decoding_guide=[b""]).guide is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"guided_decoding_guide_type": "xml"}, "of json, json_schema, regex, ebnf_grammar, token_ids, got xml"),
        ({"guided_decoding_guide_type": "structural_tag", "guided_decoding_guide": "{}"}, "got structural_tag"),
        ({"guided_decoding_guide": "a+"}, "guided_decoding_guide_type must be .* got nothing"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide must be one string for the type regex, got 0"),
    ],
)
def test_guides_that_are_half_said_are_refused(values: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        read(**{name: [text.encode()] for name, text in values.items()})  # type: ignore[arg-type]


def test_stop_is_a_flag() -> None:
    assert is_stop(tensors({"stop": True}))
    assert not is_stop(tensors({"stop": False}))
    assert not is_stop({})


def test_beams_where_the_engine_searches() -> None:
    job = read(max_beam_width=4, beam_width=3, len_penalty=2.0, early_stopping=True, beam_search_diversity_rate=0.5)
    assert job.generate.beam == BeamSearch(3, length_penalty=2.0, early_stopping=1, diversity_rate=0.5)
    assert job.generate.num_answers == 3
    assert read(max_beam_width=4, beam_width=3).generate.beam == BeamSearch(3)
    assert read(max_beam_width=4, beam_width=1, len_penalty=2.0).generate.beam is None
    with pytest.raises(InvalidArgument, match="beam_width must be from 1 to 4, got 5"):
        read(max_beam_width=4, beam_width=5)
    with pytest.raises(InvalidArgument, match="streaming requires a beam_width of 1"):
        read(max_beam_width=4, beam_width=2, streaming=True)
