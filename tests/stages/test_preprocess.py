from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.errors import CheckpointError, InvalidArgument
from llmserve.stages import stage_arrays
from llmserve.stages.chat import Message
from llmserve.stages.postprocess import Postprocessor
from llmserve.stages.preprocess import Preprocessor, TextPrompt
from llmserve.stages.stage_arrays import prepare_arrays, text_arrays
from llmserve.stages.tokenizer import load_tokenizer
from llmserve.stages.word_lists import pack_word_list, unpack_word_list
from tests.stages.conftest import write_json


@pytest.fixture(scope="module")
def baichuan(tokenizer_dirs: dict[str, Path]) -> Preprocessor:
    return Preprocessor.open(tokenizer_dirs["baichuan"])


def strings(*values: str | bytes) -> np.ndarray:
    return np.array([[value.encode() if isinstance(value, str) else value for value in values]], dtype=object)


def numbers(*values: float, kind: type[np.generic] = np.int32) -> np.ndarray:
    return np.array([values], kind)


NO_IDS = ("EMBEDDING_BIAS", "PROMPT_WARNING")


def number(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=5))
def test_word_lists_survive_packing(words: list[list[int]]) -> None:
    packed = pack_word_list(words)
    assert packed.dtype == np.int32
    assert packed.shape == (2, sum(map(len, words)))
    assert unpack_word_list(packed[None], "w") == unpack_word_list(packed, "w") == tuple(map(tuple, words))


def test_the_word_list_format() -> None:
    assert pack_word_list([[7, 8], [], [9]]).tolist() == [[7, 8, 9], [2, 3, -1]]
    assert unpack_word_list(np.array([[7, 8, 9, 0, 0], [2, 3, -1, -1, -1]]), "w") == ((7, 8), (9,))


@pytest.mark.parametrize(
    "array", [np.zeros((3, 2)), np.zeros(4), np.array([[1, 2], [2, 1]]), np.array([[1, 2], [3, -1]])]
)
def test_malformed_word_lists_are_refused_by_name(array: np.ndarray) -> None:
    with pytest.raises(InvalidArgument, match="stop_words_list"):
        unpack_word_list(array.astype(np.int32), "stop_words_list")


def test_end_and_pad_default_to_the_checkpoints(baichuan: Preprocessor) -> None:
    prompt = baichuan.prepare(TextPrompt("fox"))
    assert (prompt.end_id, prompt.pad_id, prompt.stop_words) == (2, 0, ())
    assert baichuan.prepare(TextPrompt("fox", end_id=-1, pad_id=9)).end_id == -1


def test_further_end_tokens_become_stop_words(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    write_json(tmp_path, "generation_config.json", eos_token_id=[2, 0])
    stage = Preprocessor.open(tmp_path)
    prompt = stage.prepare(TextPrompt("fox", stop_words=["hill"]))
    assert (prompt.end_id, prompt.pad_id) == (2, 2)
    assert prompt.stop_words == (tuple(stage.tokenizer.encode("hill")), (0,))
    assert stage.prepare(TextPrompt("fox", end_id=5)).stop_words == ()


def test_bad_words_are_banned_after_a_space_too(tokenizer_dirs: dict[str, Path]) -> None:
    stage = Preprocessor.open(tokenizer_dirs["qwen"])
    ids, spaced = (tuple(stage.tokenizer.encode(text)) for text in ("a", " a"))
    assert len(ids) == len(spaced) == 1
    assert stage.prepare(TextPrompt("fox", bad_words=["a", ""])).bad_words == (ids, spaced)
    assert stage.prepare(TextPrompt("fox", bad_words=[" a"])).bad_words == (spaced,)


def test_the_tokenizers_own_end_token_ends_answers_too(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    """Fine-tuned models often declare only that of the model that they come from."""
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    write_json(tmp_path, "generation_config.json", eos_token_id=0)
    own = load_tokenizer(tmp_path).decode([2], skip_special_tokens=False)
    write_json(tmp_path, "tokenizer_config.json", eos_token=own)
    prompt = Preprocessor.open(tmp_path).prepare(TextPrompt("fox"))
    assert (prompt.end_id, prompt.stop_words, prompt.pad_id) == (0, ((2,),), 0)


def test_end_tokens_that_the_network_does_not_have_are_left_out(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    write_json(tmp_path, "config.json", pretrained_config={"vocab_size": 512}, build_config={"max_seq_len": 24})

    def ends(*ids: int) -> tuple[int, tuple[tuple[int, ...], ...]]:
        write_json(tmp_path, "generation_config.json", eos_token_id=list(ids))
        prompt = Preprocessor.open(tmp_path).prepare(TextPrompt("fox"))
        return prompt.end_id, prompt.stop_words

    assert ends(1, 5000, 511, -1) == (1, ((511,),))
    assert ends(5000, 1) == (1, ())
    assert ends(5000, 512) == (5000, ()), "no other token ends an answer then"


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "user_token_id"])
@pytest.mark.parametrize("value", ["x", [[1]], {"a": 1}, 1.5, True, [1, None]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_token_ids_that_are_none_are_refused(
    file: str, value: object, name: str, tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copy(tokenizer_dirs["qwen"] / "tokenizer.json", tmp_path)
    write_json(tmp_path, file, **{name: value})
    with pytest.raises(CheckpointError) as caught:
        Preprocessor.open(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / file}: {name} must be a token id, which is an integer, or a list of them, got {value!r}"
    )


def test_an_engine_directory_is_read_as_well_as_a_checkpoint(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(tokenizer_dirs["baichuan"] / "tokenizer.model", tmp_path)
    write_json(tmp_path, "hf_config.json", model_type="baichuan", eos_token_id=2, model_max_length=4096)
    write_json(tmp_path, "config.json", pretrained_config={}, build_config={"max_seq_len": 24})
    stage = Preprocessor.open(tmp_path)
    assert stage.max_seq_len == 24
    long = [Message("user", "The small red fox runs over the quiet hill and hides under the old stone bridge.")]
    assert len(stage.prepare(TextPrompt(messages=long, max_tokens=10)).input_ids) == 14


def test_a_long_answer_reserves_at_most_half_of_the_room_for_chat(baichuan: Preprocessor) -> None:
    content = "The small red fox runs over the quiet hill and hides under the old stone bridge. "
    long = TextPrompt(messages=[Message("user", content * 3)], max_tokens=2048)
    assert baichuan.max_seq_len == 64
    assert len(baichuan.prepare(long).input_ids) == 32


def test_a_conversation_that_is_cut_says_what_is_missing(baichuan: Preprocessor) -> None:
    content = "The small red fox runs over the quiet hill."
    talk = [Message("user" if place % 2 == 0 else "assistant", content) for place in range(9)]
    cut = baichuan.prepare(TextPrompt(messages=talk, max_tokens=20)).warning
    kept = len(baichuan.prepare(TextPrompt(messages=talk, max_tokens=20)).input_ids)
    assert re.match(r"the conversation was truncated, without the first [2468] messages: there is room for 44 ", cut)
    assert kept <= 44
    alone = baichuan.prepare(TextPrompt(messages=[Message("user", content * 9)], max_tokens=20)).warning
    assert re.search(r"was truncated, without the first \d+ tokens of what is left: ", alone)
    assert baichuan.prepare(TextPrompt(messages=talk[:1], max_tokens=4)).warning == ""


def test_all_problems_of_a_prompt_come_at_once(baichuan: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match=r"(?s)there is no prompt.*one weight per word.*finite"):
        baichuan.prepare(TextPrompt(bias_words=["fox"], bias_weights=[1.0, float("nan")]))


def test_arrays_of_a_text_prompt(baichuan: Preprocessor) -> None:
    encode = baichuan.tokenizer.encode
    out = prepare_arrays(
        baichuan,
        {
            "QUERY": strings("The fox runs"),
            "REQUEST_OUTPUT_LEN": number(9),
            "STOP_WORDS_DICT": strings("hill", ""),
            "BAD_WORDS_DICT": strings(""),
            "EMBEDDING_BIAS_WORDS": strings("fox"),
            "EMBEDDING_BIAS_WEIGHTS": np.array([[2.5]], np.float32),
        },
    )
    assert out["INPUT_ID"].tolist() == [encode("The fox runs")]
    assert out["REQUEST_INPUT_LEN"].tolist() == [[len(encode("The fox runs"))]]
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[9]]
    assert unpack_word_list(out["STOP_WORDS_IDS"], "s") == (tuple(encode("hill")),)
    assert out["BAD_WORDS_IDS"].shape == (1, 2, 0)
    assert sorted(np.flatnonzero(out["EMBEDDING_BIAS"][0])) == sorted(set(encode("fox")))
    assert out["EMBEDDING_BIAS"].max() == 2.5
    assert (out["OUT_END_ID"].tolist(), out["OUT_PAD_ID"].tolist()) == ([[2]], [[0]])
    assert all(array.dtype == np.int32 for name, array in out.items() if name not in NO_IDS)


BATCH = {
    "QUERY": np.concatenate([strings("The fox runs"), strings("hill"), strings("The small red fox runs over")]),
    "REQUEST_OUTPUT_LEN": np.array([[9], [3], [5]], np.int32),
    "STOP_WORDS_DICT": np.concatenate([strings("hill", ""), strings("", ""), strings("fox", "over")]),
    "BAD_WORDS_DICT": np.concatenate([strings("red")] * 3),
    "EMBEDDING_BIAS_WORDS": np.concatenate([strings("fox"), strings(""), strings("hill")]),
    "EMBEDDING_BIAS_WEIGHTS": np.array([[2.5], [0.0], [-1.0]], np.float32),
    "END_ID": np.array([[2], [7], [-1]], np.int32),
}


def test_the_rows_of_a_batch_are_prepared_as_alone_and_padded_to_the_longest(baichuan: Preprocessor) -> None:
    out = prepare_arrays(baichuan, BATCH)
    assert {name: len(array) for name, array in out.items()} == dict.fromkeys(out, 3)
    assert out["REQUEST_OUTPUT_LEN"].tolist() == [[9], [3], [5]]
    assert out["OUT_END_ID"].tolist() == [[2], [7], [-1]]
    for row in range(3):
        alone = prepare_arrays(baichuan, {name: array[row : row + 1] for name, array in BATCH.items()})
        (length,) = out["REQUEST_INPUT_LEN"][row]
        assert out["INPUT_ID"][row].tolist() == [
            *alone["INPUT_ID"][0].tolist(),
            *[0] * (out["INPUT_ID"].shape[1] - length),  # the checkpoint's padding id
        ]
        for name in ("STOP_WORDS_IDS", "BAD_WORDS_IDS"):
            assert unpack_word_list(out[name][row], name) == unpack_word_list(alone[name], name)
        bias = alone["EMBEDDING_BIAS"][0].tolist() or [0.0] * baichuan.tokenizer.vocab_size
        assert out["EMBEDDING_BIAS"][row].tolist() == bias
        assert out["PROMPT_WARNING"][row].tolist() == alone["PROMPT_WARNING"][0].tolist()


def test_a_batch_that_would_be_mostly_padding_is_refused(
    baichuan: Preprocessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_arrays, "MAX_BATCH_NUMBERS", 3 * baichuan.tokenizer.vocab_size - 1)
    with pytest.raises(InvalidArgument, match="3 rows, each as long as the longest prompt"):
        prepare_arrays(baichuan, BATCH)
    prepare_arrays(baichuan, {name: array[:2] for name, array in BATCH.items()})


def test_inputs_of_different_batch_sizes_are_refused(baichuan: Preprocessor) -> None:
    with pytest.raises(InvalidArgument, match="QUERY has a batch of 3") as refused:
        prepare_arrays(baichuan, {**BATCH, "REQUEST_OUTPUT_LEN": number(9)})
    assert "REQUEST_OUTPUT_LEN has a batch of 1" in str(refused.value)


def test_texts_of_a_batch(baichuan: Preprocessor) -> None:
    encode = baichuan.tokenizer.encode
    first, second = encode("The fox runs"), encode("hill")
    tokens = np.zeros((2, 1, len(first)), np.int32)
    tokens[0, 0], tokens[1, 0, : len(second)] = first, second
    inputs = {
        "TOKENS_BATCH": tokens,
        "SEQUENCE_LENGTH": np.array([[len(first)], [len(second)]], np.int32),
        "FINISH_REASON": np.concatenate([strings("length"), strings("length")]),
        "TAIL_TEXT": np.concatenate([strings(""), strings("!")]),
    }
    stage = Postprocessor(baichuan.tokenizer)
    assert text_arrays(stage, inputs)["OUTPUT"].tolist() == [b"The fox runs", b"hill!"]
    for wanted in ([1, 1], [0, 1]):
        out = text_arrays(stage, {**inputs, "RETURN_TOKENS": np.array(wanted, np.bool_)[:, None]})
        longest = len(first) if wanted[0] else len(second)
        told = [*second, *[-1] * (longest - len(second))]
        assert out["TOKEN_IDS"].tolist() == [first if wanted[0] else [-1] * longest, told]
        assert out["TOKEN_BYTES"].shape == out["TOKEN_IDS"].shape
        assert b"".join(out["TOKEN_BYTES"][1]).strip() == b"hill"


def test_arrays_of_chat_messages(baichuan: Preprocessor) -> None:
    messages = strings('[{"role": "user", "content": "fox"}]')
    out = prepare_arrays(baichuan, {"MESSAGES": messages, "QUERY": strings(""), "REQUEST_OUTPUT_LEN": number(9)})
    assert out["INPUT_ID"].tolist() == [[195, *baichuan.tokenizer.encode("fox"), 196]]
    assert out["EMBEDDING_BIAS"].shape == (1, 0)
    assert out["PROMPT_WARNING"].tolist() == [[b""]]
    with pytest.raises(InvalidArgument, match="there are several prompts"):
        prepare_arrays(baichuan, {"MESSAGES": messages, "QUERY": strings("x"), "REQUEST_OUTPUT_LEN": number(9)})


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"QUERY": strings(b"\xff\xfe")}, "UTF-8"),
        ({"QUERY": strings("x"), "STOP_WORDS_DICT": strings(b"\xc3")}, "STOP_WORDS_DICT.*UTF-8"),
        ({}, "there is no prompt: give text .text_input., or messages"),
        ({"QUERY": strings("one", "two")}, "one string"),
        ({"QUERY": np.array([[b"one"], [b"two"]], dtype=object)}, "batch of 2"),
        ({"MESSAGES": strings("{")}, "JSON"),
        ({"MESSAGES": strings('[{"role": "user", "content": "\\ud800"}]')}, "surrogates"),
    ],
)
def test_bad_arrays_are_explained(baichuan: Preprocessor, inputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        prepare_arrays(baichuan, {**inputs, "REQUEST_OUTPUT_LEN": number(4)})


def test_text_of_a_whole_answer(baichuan: Preprocessor) -> None:
    ids = baichuan.tokenizer.encode("The fox runs")
    tokens = np.array([[[*ids, 2, 2], [*ids, *ids[:2]]]], np.int32)
    lengths = np.array([[len(ids), 1]], np.int32)
    out = text_arrays(Postprocessor(baichuan.tokenizer), {"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths})
    assert out["OUTPUT"].tolist() == [b"The fox runs", baichuan.tokenizer.decode(ids[:1]).encode()]


def test_text_of_one_event_continues_its_window(baichuan: Preprocessor) -> None:
    stage = Postprocessor(baichuan.tokenizer)
    window, new = baichuan.tokenizer.encode("fox é")[:-1], baichuan.tokenizer.encode("fox é")[-1:]
    inputs = {
        "TOKENS_BATCH": np.array([[new]], np.int32),
        "SEQUENCE_LENGTH": np.array([[len(new)]], np.int32),
        "WINDOW_IDS": np.array([window], np.int32),
        "FINISH_REASON": strings(""),
    }
    assert text_arrays(stage, inputs)["OUTPUT"].tolist() == ["é".encode()]
    last = {**inputs, "FINISH_REASON": strings("stop_words"), "TAIL_TEXT": strings("!")}
    assert text_arrays(stage, last)["OUTPUT"].tolist() == ["é!".encode()]


def test_an_event_without_ids_has_empty_text(baichuan: Preprocessor) -> None:
    inputs = {
        "TOKENS_BATCH": np.zeros((1, 1, 0), np.int32),
        "SEQUENCE_LENGTH": np.zeros((1, 1), np.int32),
        "WINDOW_IDS": np.zeros((1, 0), np.int32),
        "FINISH_REASON": strings("end_id"),
    }
    assert text_arrays(Postprocessor(baichuan.tokenizer), inputs)["OUTPUT"].tolist() == [b""]


def test_prompt_ids_stay_as_they_are(baichuan: Preprocessor) -> None:
    out = prepare_arrays(baichuan, {"PROMPT_IDS": numbers(5, 195, 7), "REQUEST_OUTPUT_LEN": number(9)})
    assert out["INPUT_ID"].tolist() == [[5, 195, 7]]
    with pytest.raises(InvalidArgument, match="several prompts"):
        prepare_arrays(baichuan, {"PROMPT_IDS": numbers(5), "QUERY": strings("x"), "REQUEST_OUTPUT_LEN": number(9)})


def test_a_bias_by_id_adds_to_that_of_words(baichuan: Preprocessor) -> None:
    (token,) = baichuan.tokenizer.encode("x")
    inputs = {
        "QUERY": strings("fox"), "REQUEST_OUTPUT_LEN": number(4), "EMBEDDING_BIAS_WORDS": strings("x"),
        "EMBEDDING_BIAS_WEIGHTS": numbers(2, kind=np.float32), "LOGIT_BIAS_IDS": numbers(token, 9),
        "LOGIT_BIAS_WEIGHTS": numbers(1, -3, kind=np.float32),
    }  # fmt: skip
    bias = prepare_arrays(baichuan, inputs)["EMBEDDING_BIAS"][0]
    assert {place: bias[place] for place in np.flatnonzero(bias)} == {token: 3, 9: -3}
    for name, wrong, problem in (
        ("LOGIT_BIAS_IDS", numbers(620, 1), "token 620"),
        ("LOGIT_BIAS_IDS", numbers(1), "one weight per id"),
        ("LOGIT_BIAS_WEIGHTS", numbers(1, np.nan, kind=np.float32), "logit bias weights must be finite"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            prepare_arrays(baichuan, {**inputs, name: wrong})


def test_a_request_says_whether_special_tokens_are_added(tokenizer_dirs: dict[str, Path]) -> None:
    llama = Preprocessor.open(tokenizer_dirs["llama-slow"])
    inputs = {"QUERY": strings("fox"), "REQUEST_OUTPUT_LEN": number(1)}
    found = [
        prepare_arrays(llama, {**inputs, "ADD_SPECIAL_TOKENS": numbers(adds, kind=np.bool_)})["INPUT_ID"][0].tolist()
        for adds in (True, False)
    ]
    assert found[0] == [1, *found[1]]


def test_tokens_are_told_on_request(baichuan: Preprocessor) -> None:
    stage = Postprocessor(baichuan.tokenizer)
    ids = baichuan.tokenizer.encode("é fox")
    inputs = {"TOKENS_BATCH": np.array([[[*ids, 0]]], np.int32), "SEQUENCE_LENGTH": number(len(ids))}
    assert text_arrays(stage, inputs).keys() == {"OUTPUT"}
    out = text_arrays(stage, {**inputs, "RETURN_TOKENS": numbers(1, kind=np.bool_)})
    assert out["TOKEN_IDS"].tolist() == [ids]
    assert b"".join(out["TOKEN_BYTES"][0]) == "é fox".encode()
    assert "TOKEN_IDS" not in text_arrays(stage, {**inputs, "RETURN_TOKENS": numbers(0, kind=np.bool_)})


def test_a_template_file_replaces_the_checkpoints_format(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    for text, problem in ((None, "cannot be read"), (" \n", "is empty"), ("{% if %}", f"{path} cannot be compiled")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(CheckpointError, match=problem):
            Preprocessor.open(tokenizer_dirs["baichuan"], template_file=str(path))
    path.write_text("{{ messages[0].content }}!")
    stage = Preprocessor.open(tokenizer_dirs["baichuan"], template_file=str(path))
    prepared = stage.prepare(TextPrompt(messages=[Message("user", "Hello")]))
    assert stage.tokenizer.decode(prepared.input_ids).strip() == "Hello!"
    assert not stage.is_brief  # a program runs for it
