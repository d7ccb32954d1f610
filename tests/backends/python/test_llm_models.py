"""Models that use the API as those of LLM pipelines written for Triton do: text to ids, ids to text, a model of other
models with a library of its own, a model that generates on an event loop beside its thread.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from llmserve.serving.types import Tensor
from tests.backends.python.test_execute import DECOUPLED
from tests.backends.python.test_process import PROCESS, parameter
from tests.serving.models import collect, request, serving, single, tensors, values, write_model
from tests.tiny_tokenizers import sentencepiece_model

PREPROCESSING = """
import json
from typing import List
import numpy as np
from transformers import AutoTokenizer, T5Tokenizer

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        folder = config["parameters"]["tokenizer_dir"]["string_value"]
        special = config["parameters"].get("add_special_tokens")
        self.special = special is None or special["string_value"].lower() in ("true", "1", "t", "y", "yes")
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, legacy=False, padding_side="left", trust_remote_code=True)
        if isinstance(self.tokenizer, T5Tokenizer):
            self.bos = self.tokenizer.sp_model.bos_id()
        if not self.tokenizer.pad_token:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.end_id = self.tokenizer.encode(self.tokenizer.eos_token, add_special_tokens=False)[0]
        for name in ("INPUT_ID", "REQUEST_INPUT_LEN", "STOP_WORDS_IDS", "OUT_END_ID"):
            data_type = pb_utils.get_output_config_by_name(config, name)["data_type"]
            setattr(self, name.lower() + "_dtype", pb_utils.triton_string_to_numpy(data_type))

    def execute(self, requests):
        responses = []
        for idx, request in enumerate(requests):
            query = pb_utils.get_input_tensor_by_name(request, "QUERY").as_numpy()
            length = pb_utils.get_input_tensor_by_name(request, "REQUEST_OUTPUT_LEN").as_numpy()
            stop = pb_utils.get_input_tensor_by_name(request, "STOP_WORDS_DICT")
            if stop is not None:
                stop = stop.as_numpy()
            end = pb_utils.get_input_tensor_by_name(request, "END_ID")
            end = end.as_numpy() if end is not None else [[self.end_id]] * query.shape[0]
            rows = [np.array(self.tokenizer.encode(row[0].decode(), add_special_tokens=self.special)).astype(int)
                    for row in query]
            lengths = np.array([[len(row)] for row in rows]).astype(int)
            longest = max(row.shape[0] for row in rows)
            ids = np.stack([np.pad(row, (0, longest - row.shape[0]), "constant", constant_values=(0, self.end_id))
                            for row in rows])
            responses.append(pb_utils.InferenceResponse(output_tensors=[
                pb_utils.Tensor("INPUT_ID", ids.astype(self.input_id_dtype)),
                pb_utils.Tensor("REQUEST_INPUT_LEN", lengths.astype(self.request_input_len_dtype)),
                pb_utils.Tensor("REQUEST_OUTPUT_LEN", length),
                pb_utils.Tensor("STOP_WORDS_IDS", self.word_list(stop, query.shape[0])),
                pb_utils.Tensor("OUT_END_ID", np.array(end, dtype=np.int32)),
                pb_utils.Tensor("NOBODY_DECLARED", np.zeros((1, 1), np.float32)),
            ]))
        return responses

    def word_list(self, rows: List[List[str | bytes]], count):
        if rows is None:
            return np.empty([count, 2, 0], dtype="int32")
        flat, offsets = [], []
        for row in rows:
            ids = [self.tokenizer.encode(word.decode(), add_special_tokens=False) for word in row]
            flat.append(np.array([i for one in ids for i in one]))
            offsets.append(np.cumsum(np.array([len(one) for one in ids])))
        width = max(1, max(len(one) for one in flat))
        flat = [np.pad(one, (0, width - len(one)), constant_values=0) for one in flat]
        offsets = [np.pad(one, (0, width - len(one)), constant_values=-1) for one in offsets]
        return np.array([flat, offsets], dtype="int32").transpose((1, 0, 2))

    def finalize(self):
        print("Cleaning up...")
"""

POSTPROCESSING = """
import json
import numpy as np
from transformers import AutoTokenizer

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self.skip = parameters.get("skip_special_tokens", {"string_value": "true"})["string_value"].lower() == "true"
        self.tokenizer = AutoTokenizer.from_pretrained(
            parameters["tokenizer_dir"]["string_value"], legacy=False, padding_side="left", trust_remote_code=True)
        self.tokenizer.pad_token = self.tokenizer.eos_token
        output = pb_utils.get_output_config_by_name(config, "OUTPUT")
        self.output_dtype = pb_utils.triton_string_to_numpy(output["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
            lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
            log_probs = pb_utils.get_input_tensor_by_name(request, "CUM_LOG_PROBS")
            texts = []
            for batch, beams in enumerate(tokens):
                for beam, ids in enumerate(beams):
                    text = self.tokenizer.decode(ids[:lengths[batch][beam]], skip_special_tokens=self.skip)
                    texts.append(text.encode("utf8"))
            outputs = [pb_utils.Tensor("OUTPUT", np.array(texts).astype(self.output_dtype))]
            if log_probs:
                outputs.append(pb_utils.Tensor("OUT_CUM_LOG_PROBS", log_probs.as_numpy()))
            else:
                outputs.append(pb_utils.Tensor("OUT_CUM_LOG_PROBS", np.array([[0.0]], dtype=np.float32)))
            responses.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return responses
"""

GENERATOR = """
import asyncio, threading
import numpy as np

class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, auto_complete_model_config):
        with open(pb_utils.get_model_dir() + "/settings.txt") as file:
            assert file.read() == "decoupled"
        auto_complete_model_config.set_model_transaction_policy(dict(decoupled=True))
        return auto_complete_model_config

    def initialize(self, args):
        self.logger = pb_utils.Logger
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.logger.log_info("started")

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self.answer(request), self.loop)
        return None

    async def answer(self, request):
        sender = request.get_response_sender()
        ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        wanted = int(pb_utils.get_input_tensor_by_name(request, "request_output_len").as_numpy().flat[0])
        if wanted == 0:
            error = pb_utils.TritonError(f"Error generating request: {request.request_id()}")
            answer = pb_utils.InferenceResponse(
                output_tensors=[pb_utils.Tensor("output_ids", np.asarray([[[0]]], dtype=np.int32))], error=error)
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        for i in range(wanted):
            await asyncio.sleep(0)
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if i == wanted - 1 else 0
            token = int(ids[0, i % ids.shape[1]])
            sender.send(pb_utils.InferenceResponse([
                pb_utils.Tensor("output_ids", np.array([[[token]]], np.int32)),
                pb_utils.Tensor("sequence_length", np.array([[1]], np.int32))]), flags)

    def finalize(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
"""

LIBRARY_BASE = """
from dataclasses import dataclass
from typing import Optional
import numpy as np
@dataclass
class Prompt:
    text_input: Optional[np.ndarray] = None
    max_tokens: Optional[np.ndarray] = None
class Decoder:
    def run(self, prompt):
        preproc = self.preprocess(prompt)
        for one in self.generate(preproc):
            yield self.postprocess(one)
"""
LIBRARY = """
import numpy as np
import triton_python_backend_utils as pb_utils
from lib.decode import *

class TritonDecoder(Decoder):
    def _ask(self, model, inputs, outputs):
        response = pb_utils.InferenceRequest(
            model_name=model, inputs=inputs, requested_output_names=outputs).exec(decoupled=False)
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors() if tensor.is_cpu()}
    def convert(self, request):
        prompt = Prompt()
        for name in ("text_input", "max_tokens"):
            setattr(prompt, name, pb_utils.get_input_tensor_by_name(request, name).as_numpy())
        return prompt
    def preprocess(self, prompt):
        inputs = [pb_utils.Tensor("QUERY", prompt.text_input),
                  pb_utils.Tensor("REQUEST_OUTPUT_LEN", np.expand_dims(prompt.max_tokens, 0))]
        return self._ask("preprocessing", inputs, ["INPUT_ID", "REQUEST_OUTPUT_LEN"])
    def generate(self, preproc):
        inputs = [pb_utils.Tensor("input_ids", preproc["INPUT_ID"]),
                  pb_utils.Tensor("request_output_len", preproc["REQUEST_OUTPUT_LEN"])]
        request = pb_utils.InferenceRequest(
            model_name="generator", inputs=inputs, requested_output_names=["output_ids", "sequence_length"])
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            if response.output_tensors():
                yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
    def postprocess(self, ids):
        inputs = [pb_utils.Tensor("TOKENS_BATCH", ids["output_ids"]),
                  pb_utils.Tensor("SEQUENCE_LENGTH", ids["sequence_length"])]
        return self._ask("postprocessing", inputs, ["OUTPUT"])["OUTPUT"]
"""
BLS = """
import traceback
from lib.triton_decoder import TritonDecoder
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.decoder = TritonDecoder()
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            try:
                for text in self.decoder.run(self.decoder.convert(request)):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", text)]))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception:
                pb_utils.Logger.log_error(traceback.format_exc())
                sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError(traceback.format_exc())),
                            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""
OPTIONAL = "[ -1 ] optional: true"


def write_tokenizer(directory: Path) -> sentencepiece.SentencePieceProcessor:
    """A `tokenizer.model` of Llama's kind with its config; what sentencepiece itself makes of it."""
    directory.mkdir()
    model = sentencepiece_model(400, 3)
    (directory / "tokenizer.model").write_bytes(model)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def write_pipeline(repository: Path, mode: str, tokenizer_dir: Path) -> None:
    python = f'backend: "python"\n{parameter("tokenizer_dir", str(tokenizer_dir))}{mode}'
    preprocessing = tensors(
        "input", QUERY="STRING [ 1 ]", REQUEST_OUTPUT_LEN="INT32 [ 1 ]",
        STOP_WORDS_DICT=f"STRING {OPTIONAL}", END_ID=f"INT32 {OPTIONAL}",
    ) + tensors(
        "output", INPUT_ID="INT32 [ -1 ]", REQUEST_INPUT_LEN="INT32 [ 1 ]", REQUEST_OUTPUT_LEN="INT32 [ -1 ]",
        STOP_WORDS_IDS="INT32 [ 2, -1 ]", OUT_END_ID="INT32 [ 1 ]",
    )  # fmt: skip
    postprocessing = tensors(
        "input",
        TOKENS_BATCH="INT32 [ -1, -1 ]",
        SEQUENCE_LENGTH="INT32 [ -1 ]",
        CUM_LOG_PROBS=f"FP32 {OPTIONAL}",
    ) + tensors("output", OUTPUT="STRING [ -1 ]", OUT_CUM_LOG_PROBS="FP32 [ -1 ]")
    generator = tensors("input", input_ids="INT32 [ -1 ]", request_output_len="INT32 [ 1 ]")
    generator += tensors("output", output_ids="INT32 [ -1, -1 ]", sequence_length="INT32 [ -1 ]")
    bls = tensors("input", text_input="STRING [ -1 ]", max_tokens="INT32 [ 1 ] reshape { shape: [ ] }")
    bls += tensors("output", text_output="STRING [ -1 ]") + DECOUPLED
    for name, config, code in (
        ("preprocessing", preprocessing, PREPROCESSING),
        ("postprocessing", postprocessing, POSTPROCESSING),
        ("generator", generator, GENERATOR),
        ("bls", bls, BLS),
    ):
        directory = write_model(repository, name, python + "max_batch_size: 8\n" + config, code) / "1"
        (directory / "settings.txt").write_text("decoupled")
        (directory / "lib").mkdir()
        (directory / "lib/decode.py").write_text(LIBRARY_BASE)
        (directory / "lib/triton_decoder.py").write_text(LIBRARY)


def text(name: str, *rows: list[str]) -> Tensor:
    return Tensor(name, "BYTES", np.array([[word.encode() for word in row] for row in rows], dtype=object))


def number(name: str, value: int) -> Tensor:
    return Tensor(name, "INT32", np.array([[value]], np.int32))


def decoded(pieces: sentencepiece.SentencePieceProcessor, token: int) -> str:
    """One token by itself, without special ones."""
    return "" if token == 1 else str(pieces.decode([token]))


@pytest.mark.parametrize("mode", ["", PROCESS], ids=["thread", "process"])
async def test_a_pipeline_of_models_written_for_triton(tmp_path: Path, mode: str) -> None:
    pieces = write_tokenizer(tmp_path / "tokenizer")
    write_pipeline(tmp_path / "models", mode, tmp_path / "tokenizer")
    async with serving(tmp_path / "models") as core:
        assert core.ready(), core.repository_index()
        assert core.model_config("generator").model_transaction_policy.decoupled

        asked = request(
            "preprocessing", text("QUERY", ["the old bridge"]), number("REQUEST_OUTPUT_LEN", 3),
            text("STOP_WORDS_DICT", ["fox", "hill"]),
        )  # fmt: skip
        ready = await single(core, asked)
        assert values(ready, "INPUT_ID") == [[1, *pieces.encode("the old bridge")]]
        first, second = pieces.encode(["fox", "hill"])
        ids, ends = values(ready, "STOP_WORDS_IDS")[0]
        assert ids == [*first, *second]
        assert ends[:2] == [len(first), len(first) + len(second)]
        assert values(ready, "OUT_END_ID") == [[2]]
        assert [tensor.name for tensor in ready.outputs][-1] != "NOBODY_DECLARED"

        plain = await single(core, request("preprocessing", text("QUERY", ["a"]), number("REQUEST_OUTPUT_LEN", 3)))
        assert plain.output("STOP_WORDS_IDS") is not None
        assert values(plain, "STOP_WORDS_IDS") == [[[], []]]

        answered = [*pieces.encode("hä there"), 2]
        batch = Tensor("TOKENS_BATCH", "INT32", np.array([[[*answered, 0]]], np.int32))
        answer = await single(core, request("postprocessing", batch, number("SEQUENCE_LENGTH", len(answered))))
        assert values(answer, "OUTPUT") == ["hä there".encode()]
        assert values(answer, "OUT_CUM_LOG_PROBS") == [[0.0]]

        asks = [request("bls", text("text_input", [f"w{i}"]), number("max_tokens", 5)) for i in range(6)]
        for i, responses in enumerate(await asyncio.gather(*(collect(core, ask) for ask in asks))):
            assert all(response.error is None for response in responses)
            texts = [values(response, "text_output")[0].decode() for response in responses if response.outputs]
            ids = [1, *pieces.encode(f"w{i}")]
            assert texts == [decoded(pieces, ids[place % len(ids)]) for place in range(5)]

        (failed,) = await collect(core, request("bls", text("text_input", ["w"]), number("max_tokens", 0)))
        assert "Error generating request" in str(failed.error)
