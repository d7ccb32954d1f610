"""Small tokenizers trained on a paragraph, for the test checkpoints. Both cover every byte, so any text round-trips."""

from __future__ import annotations

import io
import json
from pathlib import Path

SENTENCES = [
    "The small red fox runs over the quiet hill and hides under the old stone bridge.",
    "Return the number of items that are stored in the given list, or zero when it is empty.",
    "A river finds its way between mountains, and people build their houses along its banks.",
    "Summarize: open the file, read every line, and close it again when the work is done.",
    "In winter the lake freezes over; in spring the birds come back and sing in the morning.",
    "She writes letters to her brother, who lives in another city and works on the railway.",
    "This function raises an error if the value is missing, and returns the default otherwise.",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sentencepiece_model(vocab_size: int, num_reserved: int) -> bytes:
    """A BPE model with byte fallback: 0 <unk>, 1 <s>, 2 </s>, then control symbols up to `num_reserved`."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=num_reserved <= 3,  # Llama's tokenizer has it, Baichuan's has not
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        control_symbols=[f"<reserved_{i}>" for i in range(3, num_reserved)],
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def write_byte_level_tokenizer(path: Path, vocab_size: int) -> None:
    """Qwen's kind: byte-level BPE in tokenizer.json, ChatML template in tokenizer_config.json.

    Ids 0, 1, 2 are <|endoftext|>, <|im_start|>, <|im_end|>.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
