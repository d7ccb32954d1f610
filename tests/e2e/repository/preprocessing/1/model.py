"""Text to token ids, as the model of this name in tensorrtllm_backend goes about it: same tokenizer, same calls."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer, T5Tokenizer

NO = ("false", "0", "f", "n", "no")


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        add_special_tokens = parameters.get("add_special_tokens")
        # a placeholder that was never filled in means yes
        self.add_special_tokens = add_special_tokens is None or add_special_tokens["string_value"].lower() not in NO
        self.tokenizer = AutoTokenizer.from_pretrained(
            parameters["tokenizer_dir"]["string_value"], legacy=False, padding_side="left", trust_remote_code=True
        )
        if isinstance(self.tokenizer, T5Tokenizer):
            self.tokenizer_bos_id = self.tokenizer.sp_model.bos_id()
        if not self.tokenizer.pad_token:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.end_id = self.tokenizer.encode(self.tokenizer.eos_token, add_special_tokens=False)[0]
        self.pad_id = self.tokenizer.encode(self.tokenizer.pad_token, add_special_tokens=False)[0]
        self.vocab_size = self.tokenizer.vocab_size
        self.dtypes = {
            output["name"]: pb_utils.triton_string_to_numpy(output["data_type"]) for output in config["output"]
        }

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def given(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        query = given("QUERY")
        count = query.shape[0]
        end_id, pad_id = given("END_ID"), given("PAD_ID")
        end_id = [[self.end_id]] * count if end_id is None else end_id
        pad_id = [[self.pad_id]] * count if pad_id is None else pad_id
        ids, lengths = self.ids(query)
        if given("DECODER_QUERY") is None:
            decoder_ids = pad_id * np.ones((count, 1), np.int32)
            decoder_lengths = np.ones((count, 1), np.int32)
        else:
            decoder_ids, decoder_lengths = self.ids(given("DECODER_QUERY"))
        bias = self.bias(given("EMBEDDING_BIAS_WORDS"), given("EMBEDDING_BIAS_WEIGHTS"), count)
        tensors = {
            "INPUT_ID": ids,
            "DECODER_INPUT_ID": decoder_ids,
            "BAD_WORDS_IDS": self.words(given("BAD_WORDS_DICT"), count),
            "STOP_WORDS_IDS": self.words(given("STOP_WORDS_DICT"), count),
            "REQUEST_INPUT_LEN": lengths,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "REQUEST_OUTPUT_LEN": given("REQUEST_OUTPUT_LEN"),
            "EMBEDDING_BIAS": bias,
            "OUT_END_ID": np.array(end_id),
            "OUT_PAD_ID": np.array(pad_id),
        }
        made = [
            pb_utils.Tensor(name, tensors[name].astype(dtype)) for name, dtype in self.dtypes.items() if name in tensors
        ]
        return pb_utils.InferenceResponse(output_tensors=made)

    def ids(self, query):
        rows = [
            np.array(self.tokenizer.encode(row[0].decode(), add_special_tokens=self.add_special_tokens)).astype(int)
            for row in query
        ]
        lengths = np.array([[len(row)] for row in rows]).astype(int)
        longest = max(row.shape[0] for row in rows)
        padded = [
            np.pad(row, (0, longest - row.shape[0]), "constant", constant_values=(0, self.pad_id)) for row in rows
        ]
        return np.stack(padded), lengths

    def words(self, rows, count):
        if rows is None:
            return np.empty([count, 2, 0], dtype="int32")
        flat, offsets = [], []
        for row in rows:
            words = [word.decode() if isinstance(word, bytes) else word for word in row]
            encoded = [ids for word in words if (ids := self.tokenizer.encode(word, add_special_tokens=False))]
            flat.append(np.array([one for ids in encoded for one in ids]))
            offsets.append(np.cumsum(np.array([len(ids) for ids in encoded])))
        width = max(1, max(len(ids) for ids in flat))
        flat = [np.pad(ids, (0, width - len(ids)), constant_values=0) for ids in flat]
        offsets = [np.pad(ends, (0, width - len(ends)), constant_values=-1) for ends in offsets]
        return np.array([flat, offsets], dtype="int32").transpose((1, 0, 2))

    def bias(self, word_rows, weight_rows, count):
        if word_rows is None or weight_rows is None:
            return np.empty([count, 0], dtype=np.float32)
        made = []
        for words, weights in zip(word_rows, weight_rows, strict=True):
            row = [0.0] * len(self.tokenizer.vocab)
            for word, weight in zip(words, weights, strict=True):
                for one in self.tokenizer.encode(word.decode()):
                    row[one] += weight
            made.append(np.array(row))
        return np.array(made, dtype=np.float32)

    def finalize(self):
        print("Cleaning up...")
