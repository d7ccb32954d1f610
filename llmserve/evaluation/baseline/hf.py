"""The baseline's model: a Hugging Face checkpoint under transformers, greedy. Torch is imported here and only here.

No code from the checkpoint is ever executed: models that neither transformers nor `baichuan_torch` supports are
refused.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmserve.core import TopTokens
from llmserve.errors import CheckpointError, Unsupported, raise_problems
from llmserve.evaluation.decisions import NUM_TOP, Decision
from llmserve.models.registry import architecture_for
from llmserve.stages.chat import Message

NO_TORCH = (
    "torch and transformers are not installed: pip install 'llmserve[baseline]' "
    "(on a machine without a GPU add: --extra-index-url https://download.pytorch.org/whl/cpu)"
)


@dataclass(frozen=True, slots=True)
class HfAnswer:
    token_ids: tuple[int, ...]  # without the end token
    decisions: tuple[Decision, ...]  # decisions on its tokens and on the end token
    seconds: float


def has_transformers() -> bool:
    return find_spec("transformers") is not None


def is_available() -> bool:
    return find_spec("torch") is not None and has_transformers()


def unavailable() -> Unsupported:
    """The error for a machine without torch."""
    return Unsupported(f"the Hugging Face baseline cannot be computed: {NO_TORCH}")


def hf_versions() -> dict[str, str]:
    return {"torch": version("torch"), "transformers": version("transformers"), "threads": str(_num_threads())}


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


class HfTokenizer:
    """transformers' own tokenizer and chat template. `CheckpointError` if they would require code from the
    checkpoint."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._library: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # border: the libraries below raise all kinds for files that they do not understand
            raise CheckpointError(f"transformers has no tokenizer for this checkpoint: {error}") from error

    def ids(self, prompt: str | Sequence[Message]) -> list[int]:
        if isinstance(prompt, str):
            return list(self._library(prompt)["input_ids"])
        if not self._library.chat_template:
            raise CheckpointError("transformers has no chat template for this checkpoint")
        listed = [{"role": message.role, "content": message.content, **message.more} for message in prompt]
        try:
            text = self._library.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # border: a template can raise anything
            raise CheckpointError(f"transformers cannot render the chat template: {error}") from error
        return list(self._library(text, add_special_tokens=False)["input_ids"])

    def piece(self, token: int) -> str:
        return str(self._library.convert_ids_to_tokens(token))


class HfModel:
    """A loaded checkpoint, on the GPU if there is one. `dtype` is float16, bfloat16 or float32."""

    def __init__(self, path: Path, dtype: str) -> None:
        if not is_available():
            raise unavailable()
        import torch

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = _load(path, dtype).to(self._device).eval()

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, end_ids: Sequence[int], pad_id: int
    ) -> list[HfAnswer]:
        """Greedy answers to prompts of token ids, as one batch padded on the left. Each answer has the batch's time."""
        import torch
        from transformers import GenerationConfig

        width = max(map(len, prompts))
        pad = max(pad_id, 0)
        ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=self._device)
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self._device
        )
        # the checkpoint's own sampling defaults must not affect a greedy comparison
        self._model.generation_config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            eos_token_id=list(end_ids) or None,
            pad_token_id=pad,
            output_logits=True,
            return_dict_in_generate=True,
        )
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(input_ids=ids, attention_mask=mask)
        seconds = time.perf_counter() - started
        new_ids = output.sequences[:, width:]
        by_step = [_decisions(logits, tokens) for logits, tokens in zip(output.logits, new_ids.T, strict=True)]
        rows = zip(new_ids.tolist(), zip(*by_step, strict=True), strict=True)
        return [HfAnswer(*_until_end(new, decisions, end_ids), seconds) for new, decisions in rows]

    def decide(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Decision]:
        """Its decisions on `tokens` after a prompt."""
        import torch

        ids = torch.tensor([[*prompt, *tokens]], device=self._device)
        with torch.inference_mode():
            return _decisions(self._model(ids).logits[0, len(prompt) - 1 : -1], ids[0, len(prompt) :])

    def log_likelihoods(self, sequences: Sequence[Sequence[int]], begin: int) -> list[float]:
        """Log-likelihoods of the ids from `begin` on in each sequence, given the previous ids, in nats; one batch."""
        import torch

        width = max(map(len, sequences))
        # a sequence does not attend to padding after it
        ids = torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device=self._device)
        with torch.inference_mode():
            logits = self._model(ids).logits[:, begin - 1 : -1].float()
        told = logits.log_softmax(dim=-1).gather(2, ids[:, begin:, None])[..., 0].double()
        return [float(row[: len(sequence) - begin].sum()) for row, sequence in zip(told, sequences, strict=True)]

    def logits(self, token_ids: Sequence[int]) -> Any:
        """Float32 logits [T, V] of a whole sequence, as a numpy array."""
        import torch

        with torch.inference_mode():
            return self._model(torch.tensor([list(token_ids)], device=self._device)).logits[0].float().cpu().numpy()


def _load(path: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    from llmserve.evaluation.baseline import baichuan_torch

    baichuan_torch.register()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        has_tower = hasattr(config, "vision_config")  # for images: its tensors belong to the network, too
        # the annotations lack `output_loading_info`
        load: Any = (AutoModelForImageTextToText if has_tower else AutoModelForCausalLM).from_pretrained
        model, loading = load(
            path,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are reported as problems, by name
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    ignored = architecture_for(model.config.to_dict()).ignored
    raise_problems(CheckpointError, f"transformers did not load all of {path}", _loading_problems(loading, ignored))
    return model


def _loading_problems(loading: Mapping[str, Any], ignored: Sequence[str]) -> list[str]:
    """transformers only warns of these, and fills what is missing with random numbers."""
    unexpected = [
        name for name in sorted(loading["unexpected_keys"]) if not any(re.fullmatch(known, name) for known in ignored)
    ]
    return [
        *(f"tensor {name} is missing" for name in sorted(loading["missing_keys"])),
        *(f"tensor {name} is not used by the network" for name in unexpected),
        *(
            f"tensor {name} does not have the shape that the network expects"
            for name, *_ in sorted(loading["mismatched_keys"])
        ),
        *(str(message) for message in loading["error_msgs"]),
    ]


def _decisions(logits: Any, tokens: Any) -> list[Decision]:
    """Decisions from logits [N, V] and the next tokens [N]: of one step of N sequences, or of one sequence."""
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    best = log_probs.topk(min(NUM_TOP, log_probs.shape[1]))
    rows = zip(tokens.tolist(), chosen.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return [Decision(token, log_prob, TopTokens(tuple(i), tuple(v))) for token, log_prob, i, v in rows]


def _until_end(
    token_ids: list[int], decisions: Sequence[Decision], end_ids: Sequence[int]
) -> tuple[tuple[int, ...], tuple[Decision, ...]]:
    count = next((i for i, token in enumerate(token_ids) if token in end_ids), len(token_ids))
    return tuple(token_ids[:count]), tuple(decisions[: count + 1])
