from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece

from llmserve.errors import CheckpointError, InvalidArgument, Unsupported
from llmserve.stages.chat import Message, chat_format, parse_messages, require_chat_format, template_format
from llmserve.stages.chat_template import ChatTemplate
from llmserve.stages.files import TextFiles
from llmserve.stages.named_templates import NAMES, named_template
from llmserve.stages.tokenizer import Tokenizer, load_tokenizer
from tests.stages.conftest import write_json
from tests.tiny_tokenizers import CHAT_TEMPLATE, SENTENCES, sentencepiece_model, write_byte_level_tokenizer

USER, ASSISTANT = 195, 196


def talk(*contents: str) -> list[Message]:
    return [Message("user" if i % 2 == 0 else "assistant", content) for i, content in enumerate(contents)]


def encode(path: Path, messages: list[Message], max_ids: int | None = None) -> list[int]:
    return require_chat_format(load_tokenizer(path), TextFiles.read(path)).encode(messages, max_ids).ids


@pytest.fixture
def baichuan(tokenizer_dirs: dict[str, Path]) -> Path:
    return tokenizer_dirs["baichuan"]


@pytest.fixture
def words(tokenizers_by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_kind["baichuan"]


def test_baichuan_puts_role_ids_before_each_message(baichuan: Path, words: Tokenizer) -> None:
    messages = [Message("system", "The fox"), *talk("runs", "over", "the hill")]
    expected = [
        *words.encode("The fox"), USER, *words.encode("runs"), ASSISTANT, *words.encode("over"),
        USER, *words.encode("the hill"), ASSISTANT,
    ]  # fmt: skip
    assert encode(baichuan, messages) == expected


def test_an_answer_that_is_begun_is_not_opened_again(baichuan: Path, words: Tokenizer) -> None:
    assert encode(baichuan, talk("runs", "over")) == [USER, *words.encode("runs"), ASSISTANT, *words.encode("over")]


def test_whole_rounds_are_dropped_from_the_front(baichuan: Path, words: Tokenizer) -> None:
    messages = [Message("system", "fox"), *talk("first question", "first answer", "second question")]
    last = [*words.encode("fox"), USER, *words.encode("second question"), ASSISTANT]
    everything = encode(baichuan, messages)
    assert encode(baichuan, messages, len(everything)) == everything
    assert encode(baichuan, messages, len(everything) - 1) == last
    assert encode(baichuan, messages, len(last)) == last


def test_what_is_left_out_is_counted(baichuan: Path) -> None:
    chat = require_chat_format(load_tokenizer(baichuan), TextFiles.read(baichuan))
    messages = talk("first question", "first answer", "second question", "second answer", "third")
    last = chat.encode(messages[-1:])
    assert (last.num_messages_left_out, last.num_ids_cut, last.what_is_missing()) == (0, 0, "")
    fitting = chat.encode(messages, len(last.ids))
    assert (fitting.ids, fitting.num_messages_left_out, fitting.num_ids_cut) == (last.ids, 4, 0)
    cut = chat.encode(messages, len(last.ids) - 1)
    assert (cut.ids, cut.num_messages_left_out, cut.num_ids_cut) == (last.ids[1:], 4, 1)
    assert cut.what_is_missing() == "without the first 4 messages and without the first 1 token of what is left"


def test_a_single_round_that_is_too_long_loses_its_beginning(baichuan: Path) -> None:
    messages = talk("The small red fox runs over the quiet hill")
    whole = encode(baichuan, messages)
    assert encode(baichuan, messages, 4) == whole[-4:]


def test_role_ids_come_from_generation_config(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((tokenizer_dirs["llama-slow"] / "tokenizer.model").read_bytes())
    write_json(tmp_path, "generation_config.json", user_token_id=7, assistant_token_id=8)
    ids = encode(tmp_path, talk("fox"))
    assert ids[0] == 7
    assert ids[-1] == 8


def test_the_spelling_of_a_role_token_is_plain_text(tmp_path: Path) -> None:
    """Also where the vocabulary, unlike ours, would read it as the token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_writer=model, model_type="bpe", vocab_size=400, minloglevel=2,
        byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=["<reserved_106>", "<reserved_107>"],
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    role = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).piece_to_id("<reserved_106>")
    write_json(tmp_path, "generation_config.json", user_token_id=role, assistant_token_id=role + 1)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<reserved_106>") == [role]
    ids = encode(tmp_path, talk("say <reserved_106> now"))
    assert ids.count(role) == 1
    assert tokenizer.decode(ids[1:-1]) == "say <reserved_106> now"


def test_a_template_is_rendered_as_transformers_does(tokenizer_dirs: dict[str, Path]) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tokenizer_dirs["qwen"]
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    messages = [Message("system", "Be <brief> & kind."), *talk("runs", "over", "the hill")]
    listed = [{"role": message.role, "content": message.content} for message in messages]
    expected = theirs.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(CHAT_TEMPLATE, {}).render(listed) == expected
    assert encode(path, messages) == theirs(expected, add_special_tokens=False)["input_ids"]


LLAMA_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def write_llama_chat(path: Path, *, legacy: bool) -> sentencepiece.SentencePieceProcessor:
    """Llama 2's: a tokenizer.model, special tokens in the config, and a token added behind the vocabulary of 400."""
    (path / "tokenizer.model").write_bytes(sentencepiece_model(400, 3))
    added = {"1": {"content": "<s>"}, "2": {"content": "</s>"}, "400": {"content": "<|turn|>", "special": True}}
    write_json(
        path, "tokenizer_config.json", tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", legacy=legacy, added_tokens_decoder=added, chat_template=LLAMA_TEMPLATE,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))


def test_special_tokens_of_a_template_become_ids_with_sentencepiece_too(tmp_path: Path) -> None:
    plain = write_llama_chat(tmp_path, legacy=True).encode
    assert encode(tmp_path, talk("The fox", "runs", "over")) == [
        1, *plain("[INST] The fox [/INST] runs "), 2, 1, *plain("[INST] over [/INST]"),
    ]  # fmt: skip


@pytest.mark.parametrize("legacy", [True, False])
def test_marked_text_is_encoded_as_transformers_does(tmp_path: Path, legacy: bool) -> None:
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    model = write_llama_chat(tmp_path, legacy=legacy)
    pieces = [model.id_to_piece(token) for token in range(model.vocab_size())]
    scores = {piece: model.get_score(token) for token, piece in enumerate(pieces)}
    vocab = {piece: token for token, piece in enumerate(pieces)}
    theirs = LlamaTokenizer(
        vocab=vocab, merges=generate_merges(vocab, scores), legacy=legacy, additional_special_tokens=["<|turn|>"]
    )
    ours = load_tokenizer(tmp_path)
    texts = [
        "<s>[INST] The fox [/INST] runs over </s><s>[INST] the hill [/INST]", "The fox</s>river", "<s>", "a<unk>b",
        "<|turn|>user\nfox</s>\n<|turn|>", "The é <s>é",
    ]  # fmt: skip
    for text in texts:
        assert ours.encode_marked(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.decode([400, *ours.encode("fox")]) == "fox"


def test_an_added_end_token_is_known_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(400, 3))
    write_json(tmp_path, "tokenizer_config.json", eos_token="<|im_end|>")
    write_json(tmp_path, "added_tokens.json", **{"<|im_end|>": 401})
    assert load_tokenizer(tmp_path).eos_id == 401
    write_json(tmp_path, "added_tokens.json", **{"<|im_end|>": "x"})
    with pytest.raises(CheckpointError, match="added tokens"):
        load_tokenizer(tmp_path)


def test_templates_trim_blocks_and_know_special_tokens() -> None:
    source = "{{ bos_token }}\n{% for m in messages %}\n  {% if m.role %}\n[{{ m.content }}]{% endif %}{% endfor %}"
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "fox"}])
    assert rendered == "<s>\n[fox]"


def test_a_template_may_mark_what_the_assistant_said() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "x"}]) == "x|"


def test_a_template_in_its_own_file_wins(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dirs["qwen"] / "tokenizer.json").read_bytes())
    write_json(tmp_path, "tokenizer_config.json", chat_template=[{"name": "default", "template": "old"}])
    assert TextFiles.read(tmp_path).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert load_tokenizer(tmp_path).decode(encode(tmp_path, talk("fox"))) == "new fox"


def test_a_template_for_tools_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    """As transformers saves several templates."""
    (tmp_path / "chat_template.jinja").write_text("plain")
    assert TextFiles.read(tmp_path).tool_template == "plain"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    files = TextFiles.read(tmp_path)
    assert (files.chat_template, files.tool_template) == ("plain", "with tools")
    given = files.with_template("given", "")
    assert (given.chat_template, given.tool_template) == ("given", "given")


def test_a_template_of_a_processor_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    """As in Mistral Small 3.1."""
    write_json(tmp_path, "chat_template.json", chat_template="of images")
    files = TextFiles.read(tmp_path)
    assert (files.chat_template, files.template_place) == ("of images", str(tmp_path / "chat_template.json"))
    write_json(tmp_path, "tokenizer_config.json", chat_template="of texts")
    assert TextFiles.read(tmp_path).chat_template == "of texts"


def test_a_template_that_is_wrong_is_named_by_its_file(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_dirs["qwen"] / "tokenizer.json").read_bytes())
    write_json(tmp_path, "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(CheckpointError, match=f"the chat template in {tmp_path}/tokenizer_config.json cannot be"):
        chat_format(load_tokenizer(tmp_path), TextFiles.read(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(CheckpointError, match=f"the chat template in {tmp_path}/chat_template.jinja cannot be"):
        chat_format(load_tokenizer(tmp_path), TextFiles.read(tmp_path))


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"])
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(InvalidArgument, match="refuses"):
        ChatTemplate(attack, {}).render([{"role": "user", "content": "x"}])


def test_a_template_with_a_syntax_error_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_a_checkpoint_without_a_chat_format_says_so(tokenizer_dirs: dict[str, Path]) -> None:
    path = tokenizer_dirs["llama-slow"]
    assert chat_format(load_tokenizer(path), TextFiles.read(path)) is None
    with pytest.raises(Unsupported, match="no chat format"):
        encode(path, talk("fox"))


def test_unknown_roles_are_listed(baichuan: Path) -> None:
    messages = [Message("user", "a"), Message("system", "b"), Message("critic", "c")]
    with pytest.raises(InvalidArgument, match=r"(?s)'system'.*'critic'"):
        encode(baichuan, messages)
    with pytest.raises(InvalidArgument, match="no user message"):
        encode(baichuan, [Message("system", "b")])


def test_equal_messages_are_told_apart(baichuan: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"(?s)message 1 has.*message 2 has.*and 4901 more"):
        encode(baichuan, [Message("user", "a"), *[Message("critic", "b")] * 5000])


def test_messages_come_as_json() -> None:
    text = json.dumps([{"role": "user", "content": "Hello"}])
    assert parse_messages(text) == [Message("user", "Hello")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "non-empty list"),
        ('{"role": "user"}', "non-empty list"),
        ('[{"role": "user"}, 3, {"role": 1, "content": "x"}]', r"(?s)message 0.*content.*message 1.*message 2.*role"),
    ],
)
def test_bad_messages_are_explained(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        parse_messages(text)


def test_a_template_reads_further_values_and_none_that_are_the_servers() -> None:
    template = ChatTemplate("{{ messages[0].content }}{% if thinks %} <think>{% endif %}", {"bos_token": "<s>"})
    listed = [{"role": "user", "content": "fox"}]
    assert (template.render(listed), template.render(listed, {"thinks": True})) == ("fox", "fox <think>")
    with pytest.raises(InvalidArgument, match="must not have bos_token, messages"):
        template.render(listed, {"messages": [], "bos_token": "x"})


def test_templates_by_their_names(tmp_path: Path) -> None:
    talk = [Message("system", "Be brief "), Message("user", "Hi"), Message("assistant", "Yes"), Message("user", "So?")]
    write_byte_level_tokenizer(tmp_path, 420)
    tokenizer, files = load_tokenizer(tmp_path), TextFiles.read(tmp_path)

    def text(name: str, messages: list[Message]) -> str:
        return template_format(tokenizer, replace(files, chat_template_file=named_template(name) or "")).text(messages)

    assert text("llama3", talk[:2]) == (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert text("command-r", talk[1:]) == (
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yes<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>So?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    )
    for name in NAMES:
        begun = text(name, talk[1:2])  # a conversation grows at its end
        assert text(name, talk[1:]).startswith(f"{begun}Yes")
    assert text("chatml", talk) == ChatTemplate(files.chat_template, {}).render(
        [{"role": each.role, "content": each.content} for each in talk]
    )  # the tokenizer's own template, which keeps white space
    with pytest.raises(InvalidArgument, match="no role system"):
        text("gemma", talk)
    assert text("gemma", talk[1:2]) == "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("begun", ["", "|", "end", "<", "The first\n", "user"])
def test_an_answer_continues_whatever_it_begins_with(begun: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    opening = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML, {}).render(messages) == opening + begun
    trimming = ChatTemplate(CHATML.replace("m.content", "m.content.split('</think>')[-1] | trim"), {})
    assert trimming.render(messages) == (opening + begun).rstrip()
    messages[1]["content"] = f"<think>\nx\n</think>\n\n{begun}"
    assert trimming.render(messages) == (opening + begun).rstrip()


def test_a_template_that_leaves_out_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidArgument, match="leaves out the last message"):
        template.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}])
