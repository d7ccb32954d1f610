"""Token ids to text, as the model of this name in tensorrtllm_backend goes about it."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        skip = parameters.get("skip_special_tokens", {"string_value": "true"})
        self.skip_special_tokens = skip["string_value"].lower() in ("true", "1", "t", "y", "yes")
        self.tokenizer = AutoTokenizer.from_pretrained(
            parameters["tokenizer_dir"]["string_value"], legacy=False, padding_side="left", trust_remote_code=True
        )
        self.tokenizer.pad_token = self.tokenizer.eos_token
        output = pb_utils.get_output_config_by_name(config, "OUTPUT")
        self.output_dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        self.has_lengths = pb_utils.get_input_config_by_name(config, "SEQUENCE_LENGTH") is not None
        read = ("TOKENS_BATCH", "SEQUENCE_LENGTH")
        self.passed_on = [given for given in config["input"] if given["name"] not in read]

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = np.full(tokens.shape[:2], tokens.shape[2])
        if self.has_lengths:
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        texts = np.array(self.texts(tokens, lengths))
        tensors = [pb_utils.Tensor("OUTPUT", texts.astype(self.output_dtype))]
        for config in self.passed_on:
            given = pb_utils.get_input_tensor_by_name(request, config["name"])
            if given is None and config.get("optional"):
                dtype = pb_utils.triton_string_to_numpy(config["data_type"])
                array = np.zeros((1,) * (1 + len(config["dims"])), dtype=dtype)
            else:
                array = given.as_numpy()  # a required one is there
            tensors.append(pb_utils.Tensor(f"OUT_{config['name']}", array))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def texts(self, tokens, lengths):
        return [
            self.tokenizer.decode(ids[: lengths[row][beam]], skip_special_tokens=self.skip_special_tokens).encode()
            for row, beams in enumerate(tokens)
            for beam, ids in enumerate(beams)
        ]

    def finalize(self):
        print("Cleaning up...")
