"""Checks that the engine samples as defined: the same tokens as the numpy sampler, from the engine's own logits.

The logits come with the answer (`return_generation_logits`). So a temperature that is applied twice, a lost penalty or
a filter in the wrong place is found, regardless of the network's rounding.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

import numpy as np

from llmserve.client import Parameter
from llmserve.core import Logits, SamplingParams
from llmserve.evaluation.served.comparison import Difference, ServedResult
from llmserve.evaluation.served.replies import GrpcAsker, Question
from llmserve.evaluation.served.sampling_model import Draw
from llmserve.scheduler.plan import SampleRequest

NAME = "drawn"
MAX_TOKENS = 16  # of an answer: each comes with the logits of the whole vocabulary
FILTERS: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
SETTINGS = (FILTERS, {**FILTERS, **PENALTIES})


async def judge_draws(
    asker: GrpcAsker, questions: Sequence[Question], prompts: Sequence[Sequence[int]], *, is_judged: bool
) -> ServedResult:
    """All at once; `prompts`: the questions' ids. Raises `LlmserveError` if an answer is missing."""
    asked = [
        _difference(asker, question, ids, settings, seed)
        for settings in SETTINGS
        for seed, (question, ids) in enumerate(zip(questions, prompts, strict=True))
    ]
    found = await asyncio.gather(*asked)
    return ServedResult(NAME, len(asked), tuple(each for each in found if each is not None), is_judged)


async def _difference(
    asker: GrpcAsker, question: Question, prompt: Sequence[int], settings: Mapping[str, float], seed: int
) -> Difference | None:
    """The first token that differs from numpy's draw."""
    params = SamplingParams(
        **{name: value if name == "top_k" else float(np.float32(value)) for name, value in settings.items()},  # type: ignore[arg-type]
        seed=seed,
    )
    tokens, logits, num_prompt = await _answer(asker, question, settings, seed)
    if num_prompt != len(prompt):  # a conversation that was truncated differently, because the answer is so short
        return None
    for place, token in enumerate(tokens):
        history = [*prompt, *tokens[:place]]
        draw = Draw.of(logits[place], SampleRequest(params, 0, len(history), history, len(prompt)))
        if not draw.allows(token):
            return Difference(question.id, "drawn token", place, str(draw.token), str(token))
    return None


async def _answer(
    asker: GrpcAsker, question: Question, settings: Mapping[str, float], seed: int
) -> tuple[list[int], Logits, int]:
    """Token ids, the logits of each, and the number of tokens in the prompt."""
    messages = question.messages()
    inputs: dict[str, Parameter] = {
        **({"text_input": str(question.prompt)} if messages is None else {"messages": json.dumps(messages)}),
        **settings,
        "seed": seed,
        "max_tokens": min(question.max_tokens, MAX_TOKENS),
        "return_tokens": True,
        "return_generation_logits": True,
    }
    outputs = await asker.client.infer(inputs, request_id=question.id)
    tokens, logits = outputs["output_token_ids"].ravel().tolist(), outputs["generation_logits"]
    return tokens, logits.reshape(-1, logits.shape[-1]), int(outputs["num_prompt_tokens"].item())
