"""What `llmserve chat` sends to a model that takes text and no messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.cli.chat.prompts import Prompts, more_inputs, prompts_for
from llmserve.errors import CheckpointError
from tests.stages.conftest import WRITERS, write_json
from tests.tiny_tokenizers import CHAT_TEMPLATE

TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Why?"},
]
TEXT_ONLY = """
    name: "ensemble"
    input { name: "text_input" data_type: TYPE_STRING dims: 1 }
    input { name: "max_tokens" data_type: TYPE_INT32 dims: 1 }
    ensemble_scheduling { step { model_name: "preprocessing" } step { model_name: "tensorrt_llm" } }
"""


def parsed(text: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(text, ModelConfig())
    return config


@dataclass
class FakeClient:
    """Configs by the name of the model."""

    url: str = "server:8001"
    model: str = "ensemble"
    configs: Mapping[str, str] = field(default_factory=dict)

    async def config(self) -> ModelConfig:
        return await self.config_of(self.model)

    async def config_of(self, model: str) -> ModelConfig:
        return parsed(self.configs.get(model, ""))


def prompts(tokenizer_dir: Path | None = None, **configs: str) -> Prompts:
    client = FakeClient(configs={"ensemble": TEXT_ONLY, **configs})
    return asyncio.run(prompts_for(client, tokenizer_dir))  # type: ignore[arg-type]


def reads(directory: Path, more: str = "") -> str:
    return f'parameters {{ key: "tokenizer_dir" value {{ string_value: "{directory}" }} }} {more}'


@pytest.fixture(scope="module")
def tokenizer_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in ("qwen", "llama-slow", "baichuan")}
    for kind, path in paths.items():
        WRITERS[kind](path)
    return paths


@pytest.fixture
def qwen(tokenizer_dirs: dict[str, Path]) -> Path:
    return tokenizer_dirs["qwen"]


def test_messages_stay_messages_where_the_model_takes_them(qwen: Path) -> None:
    both = TEXT_ONLY + 'input { name: "messages" data_type: TYPE_STRING dims: 1 }'
    made = prompts(qwen, ensemble=both)
    assert (made.note, made.prompt(TALK)) == ("", TALK)


FORMATTED = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.mark.parametrize("named_by", ["user", "server"])
def test_the_format_is_applied_here_with_a_tokenizer_at_hand(qwen: Path, named_by: str) -> None:
    made = (
        prompts(qwen)
        if named_by == "user"
        else prompts(preprocessing=reads(Path("/not/on/this/machine")), tensorrt_llm=reads(qwen))
    )
    assert made.note == f"model 'ensemble' takes text, not messages: the chat format of {qwen} is applied here"
    assert made.prompt(TALK) == FORMATTED


@pytest.mark.parametrize(("says", "begin"), [("", ""), ("false", "<s>")])
def test_what_the_server_s_tokenizer_adds_is_not_sent(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, says: str, begin: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes((tokenizer_dirs["llama-slow"] / "tokenizer.model").read_bytes())
    write_json(tmp_path, "tokenizer_config.json", bos_token="<s>", chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    more = f'parameters {{ key: "add_special_tokens" value {{ string_value: "{says}" }} }}' if says else ""
    made = prompts(preprocessing=reads(tmp_path, more))
    assert made.prompt(TALK) == begin + FORMATTED


def test_without_a_tokenizer_it_says_that_questions_go_as_they_are() -> None:
    made = prompts()
    assert made.prompt(TALK) == "Why?"
    assert "--tokenizer-dir DIR (an engine or a checkpoint) applies the format here" in made.note


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("baichuan", "with special tokens that have no text form"), ("llama-slow", "has no chat template")],
)
def test_formats_that_text_cannot_carry(tokenizer_dirs: dict[str, Path], kind: str, reason: str) -> None:
    made = prompts(tokenizer_dirs[kind])
    assert made.prompt(TALK) == "Why?"
    assert reason in made.note


def test_a_folder_that_the_user_names_must_have_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        prompts(tmp_path)
    assert prompts(preprocessing=reads(tmp_path)).prompt(TALK) == "Why?"  # what the server names need not


def test_parameters_have_the_model_s_own_names() -> None:
    old = """
        input { name: "random_seed" } input { name: "bad_words" } input { name: "stop_words" optional: true }
        input { name: "max_tokens" }
    """
    assert more_inputs(parsed(old), {"max_tokens": 4, "seed": 7}) == {
        "max_tokens": 4,
        "random_seed": 7,
        "bad_words": "",
    }
    assert more_inputs(parsed('input { name: "seed" }'), {"seed": 7}) == {"seed": 7}
