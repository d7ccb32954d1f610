"""Make a checkpoint for a draft engine: some layers of an engine's network, trained on that engine's own answers.

    python -m tools.train_draft answers ENGINE --output answers.jsonl
    python -m tools.train_draft train CHECKPOINT ENGINE answers.jsonl --output drafting --layers 0,1,2,29

The embedding and the head do not change, so the layers only have to learn which token the network would choose, not
what tokens mean. Give prompts like those that the draft engine is for with `--prompts`. By default, prompts ask for
stories and for summaries of docstrings of installed packages. No network connection is used.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import shutil
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings
from llmserve.errors import PromptTooLong
from llmserve.evaluation.prompts import PromptEncoder
from llmserve.stages.chat import Message
from tools.bench_speculation import SUBJECTS
from tools.train_demo_checkpoint import training_pairs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

ADJECTIVES = (
    "an old", "a young", "a lost", "a broken", "a golden", "a secret", "a quiet", "a brave", "a hungry", "a blue",
    "a tiny", "a strange", "a magic", "a stolen", "an angry", "a forgotten", "a clever", "a lonely", "the last", "two",
)  # fmt: skip
NOUNS = (
    "ship river garden piano cat fox teacher painter sailor king child robot train village mountain forest bridge "
    "castle library key mirror lantern boat horse bird whale wolf rose star moon stone ring crown door house tower "
    "road market farm mill school museum circus song picture camera watch bicycle balloon kite doll mask coat hat "
    "umbrella candle cake apple soldier doctor farmer writer poet magician thief detective pilot captain friend ghost "
    "dragon giant witch mermaid bear lion elephant frog bee spider mouse owl swan goat camel"
)
DOCUMENT_LETTERS = range(250, 2000)
AT_ONCE = 64  # concurrent answers of an engine
TOKENS_PER_BATCH = 4096  # of a training step, padding included
HELD_OUT = 96  # examples
WARMUP_STEPS = 30
REPORT_EVERY = 50  # steps
TOKENIZER_FILES = "tokenizer*"  # in an engine directory
VOCABULARY_FILE = "draft_vocabulary.jsonl"  # the answers' tokens, for `llmserve build --draft-vocabulary`

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


class Example(NamedTuple):
    prompt: list[int]
    answer: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def default_prompts(seed: int) -> list[str]:
    """Half stories, half summaries; without the stories of bench_speculation."""
    rng = random.Random(seed)
    pairs = training_pairs([Path(sysconfig.get_path("purelib"))], seed)
    documents = sorted({pair.document for pair in pairs if len(pair.document) in DOCUMENT_LETTERS})
    summaries = [f"Summarize this text, quoting its main sentences:\n\n{document}" for document in documents]
    subjects = [f"{adjective} {noun}" for adjective, noun in itertools.product(ADJECTIVES, NOUNS.split())]
    stories = [f"Write a story about {subject}." for subject in subjects if subject not in SUBJECTS]
    rng.shuffle(summaries)
    rng.shuffle(stories)
    return [prompt for pair in zip(stories, summaries, strict=False) for prompt in pair]


@app.command()
def answers(
    engine: Path,
    output: Annotated[Path, typer.Option(help="JSON lines: the ids of a prompt and of its answer.")],
    prompts: Annotated[Path | None, typer.Option(help="A file with a JSON string on each line.")] = None,
    count: Annotated[int, typer.Option(help="Most prompts.")] = 3000,
    tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 160,
    threads: Annotated[int, typer.Option(help="0: the cores.")] = 0,
    seed: int = 0,
) -> None:
    """Ask an engine, greedily."""
    found = [json.loads(line) for line in prompts.read_text().splitlines()] if prompts else default_prompts(seed)
    opened = open_engine(engine, EngineSettings(threads=threads))
    try:
        with output.open("w") as file:
            asyncio.run(_ask(opened, PromptEncoder(engine, tokens), found[:count], tokens, file))
    finally:
        opened.close()


async def _ask(engine: Engine, encoder: PromptEncoder, prompts: Sequence[str], tokens: int, file: Any) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, text: str) -> None:
        async with turns:
            try:
                prompt = encoder.encode((Message("user", text),))
            except PromptTooLong:
                return
            end = [prompt.end_id] if prompt.end_id >= 0 else []
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
            request = GenerateRequest(str(number), tuple(prompt.input_ids), sampling, end_id=end[0] if end else None)
            async with aclosing(engine.submit(request)) as events:
                answer = [int(token) async for event in events for token in event.token_ids]
            if len(answer) < tokens:
                answer += end
            file.write(json.dumps(Example(list(prompt.input_ids), answer)._asdict()) + "\n")

    await asyncio.gather(*(ask(number, text) for number, text in enumerate(prompts)))


@app.command()
def train(
    checkpoint: Annotated[Path, typer.Argument(help="Of the network: a folder, or a GGUF file.")],
    engine: Annotated[Path, typer.Argument(help="Of the same network: the result has its tokenizer.")],
    answers: Path,
    output: Annotated[Path, typer.Option(help="A new folder for the checkpoint.")],
    layers: Annotated[str, typer.Option(help="Those that the draft engine begins with.")],
    minutes: Annotated[float, typer.Option(help="Training time; the learning rate follows the clock.")] = 60.0,
    steps: Annotated[int, typer.Option(help="Train this many steps instead.")] = 0,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    threads: int = 2,
    seed: int = 0,
) -> None:
    """Train, and write a checkpoint for `llmserve build`."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    examples = [Example(**json.loads(line)) for line in answers.read_text().splitlines()]
    rng.shuffle(examples)
    held_out = min(HELD_OUT, len(examples) // 10)
    student = Student(checkpoint, [int(layer) for layer in layers.split(",")], examples)
    print(f"untrained: {student.accuracy(examples[:held_out]):.3f} of held-out tokens", flush=True)
    started, step = time.monotonic(), 0
    for batch in _endless_batches(examples[held_out:], rng):
        progress = step / steps if steps else (time.monotonic() - started) / (60 * minutes)
        if progress >= 1:
            break
        loss = student.step(batch, rate * min(1.0, (step + 1) / WARMUP_STEPS) * _cosine(progress))
        step += 1
        if step % REPORT_EVERY == 0:
            print(f"step {step}  progress {progress:.3f}  loss {loss:.3f}", flush=True)
    print(f"after {step} steps: {student.accuracy(examples[:held_out]):.3f} of held-out tokens", flush=True)
    _save(student.model, output)
    (output / VOCABULARY_FILE).write_text(json.dumps({"prompt_ids": student.tokens}) + "\n")
    for path in engine.glob(TOKENIZER_FILES):
        shutil.copyfile(path, output / path.name)


def _cosine(progress: float) -> float:
    return 0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * progress))


def _batches(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Batches of examples with similar lengths, in random order."""
    batches: list[list[Example]] = []
    width = 0
    for example in sorted(examples, key=lambda example: example.length + rng.random() * 32):
        width = max(width, example.length)
        if not batches or width * (len(batches[-1]) + 1) > TOKENS_PER_BATCH:
            batches.append([])
            width = example.length
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def _endless_batches(examples: Sequence[Example], rng: random.Random) -> Iterator[list[Example]]:
    while True:
        yield from _batches(examples, rng)


class Student:
    """Layers of a network that learn its answers. Only tokens that occur in the answers compete in training."""

    def __init__(self, checkpoint: Path, layers: Sequence[int], examples: Sequence[Example]) -> None:
        import torch

        self.model = _shortened(checkpoint, layers)
        head = self.model.get_output_embeddings().weight
        head.requires_grad_(False)
        self.model.get_input_embeddings().weight.requires_grad_(False)
        self.tokens = sorted({token for example in examples for token in example.answer})
        used = torch.tensor(self.tokens)
        self._place = torch.full((head.shape[0],), -1)
        self._place[used] = torch.arange(len(used))
        self._head = head.detach()[used]
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, betas=(0.9, 0.95), weight_decay=0.05)

    def step(self, batch: Sequence[Example], rate: float) -> float:
        import torch
        from torch.nn import functional

        for group in self._optimizer.param_groups:
            group["lr"] = rate
        logits, targets = self._logits(batch)
        loss = functional.cross_entropy(logits, targets)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return float(loss.detach())

    def accuracy(self, examples: Sequence[Example]) -> float:
        """The share of tokens for which the best one is the network's."""
        import torch

        right = total = 0
        with torch.no_grad():
            for batch in _batches(examples, random.Random(0)):
                logits, targets = self._logits(batch)
                right += int((logits.argmax(-1) == targets).sum())
                total += len(targets)
        return right / total if total else math.nan

    def _logits(self, batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """Logits [N, used tokens] of all tokens of the answers, and their targets [N]."""
        import torch
        from torch.nn import functional

        ids = torch.zeros(len(batch), max(example.length for example in batch), dtype=torch.long)
        for row, example in zip(ids, batch, strict=True):
            row[: example.length] = torch.tensor(example.prompt + example.answer)  # causal: padding needs no mask
        places = [
            (row, len(example.prompt) - 1 + place)
            for row, example in enumerate(batch)
            for place in range(len(example.answer))
        ]
        targets = torch.tensor([token for example in batch for token in example.answer])
        rows, columns = torch.tensor(places).T
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[rows, columns]
            logits = functional.linear(hidden, self._head)
        return logits.float(), self._place[targets]


def _shortened(checkpoint: Path, layers: Sequence[int]) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    is_file = checkpoint.is_file()
    place: dict[str, Any] = {"gguf_file": checkpoint.name} if is_file else {}
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint.parent if is_file else checkpoint, dtype=torch.float32, local_files_only=True, **place
    )
    decoder: Any = model.base_model
    decoder.layers = torch.nn.ModuleList([decoder.layers[layer] for layer in layers])
    for place_of_layer, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = place_of_layer
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[layer] for layer in layers]
    return model


def _save(model: PreTrainedModel, output: Path) -> None:
    """Writes float32, also for a network from a GGUF file, which transformers refuses to save."""
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if all(tensor.data_ptr() != other.data_ptr() for other in tensors.values()):  # a head may share memory
            tensors[name] = tensor.contiguous()
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    app()
