"""Backend `tensorrtllm`: serves an engine directory as the `tensorrt_llm` step, with the tensors of Triton's backend of
that name in both generations of its contract.

    parameters.py   a model's config -> where the engine is, and with which limits it runs
    tensors.py      a request's tensors -> GenerateRequest, every problem reported at once
    batches.py      a request with several prompts -> one for each, and their responses as one stream
    responses.py    an event -> the response's tensors
    compared_answers.py    what of two answers to one request has to be equal
    active.py       running requests by tenant and the client's id, for `stop`
    gauges.py       engine statistics -> `nv_trt_llm_*`
    backend.py      the backend and its one instance
    triton_model.py the same in a Triton server, behind its Python backend
"""

from llmserve.backends.tensorrtllm.backend import TensorrtLlmBackend

__all__ = ["TensorrtLlmBackend"]
