"""A tokenizer as checkpoints bring their own, Baichuan2 for one: a class over sentencepiece that transformers runs."""

import sentencepiece
from transformers.tokenization_utils import AddedToken, PreTrainedTokenizer

from .pieces_files import VOCAB_FILES_NAMES


class PiecesTokenizer(PreTrainedTokenizer):
    vocab_files_names = VOCAB_FILES_NAMES
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        vocab_file,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
        sp_model_kwargs=None,
        add_bos_token=True,
        add_eos_token=False,
        clean_up_tokenization_spaces=False,
        **kwargs,
    ):
        def as_token(token):
            return AddedToken(token, lstrip=False, rstrip=False) if isinstance(token, str) else token

        self.sp_model_kwargs = sp_model_kwargs or {}
        self.vocab_file = vocab_file
        self.add_bos_token = add_bos_token
        self.add_eos_token = add_eos_token
        self.sp_model = sentencepiece.SentencePieceProcessor(**self.sp_model_kwargs)
        self.sp_model.Load(vocab_file)
        super().__init__(
            unk_token=as_token(unk_token),
            bos_token=as_token(bos_token),
            eos_token=as_token(eos_token),
            pad_token=as_token(pad_token),
            add_bos_token=add_bos_token,
            add_eos_token=add_eos_token,
            sp_model_kwargs=self.sp_model_kwargs,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
            **kwargs,
        )

    @property
    def vocab_size(self):
        return self.sp_model.get_piece_size()

    def get_vocab(self):
        return {self.convert_ids_to_tokens(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return self.sp_model.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.sp_model.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.sp_model.IdToPiece(index)

    def convert_tokens_to_string(self, tokens):
        return self.sp_model.decode(tokens)

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        begin = [self.bos_token_id] if self.add_bos_token else []
        end = [self.eos_token_id] if self.add_eos_token else []
        return begin + token_ids_0 + end
