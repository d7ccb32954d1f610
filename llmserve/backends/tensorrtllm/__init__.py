"""Backend `tensorrtllm`: serves an engine directory as the `tensorrt_llm` step, with the tensors of Triton's backend of
that name in both generations of its contract.

    parameters.py   a model's config -> where the engine is, and with which limits it runs
    tensors.py      a request's tensors -> GenerateRequest, every problem reported at once
    batches.py      a request with several prompts -> one request each, with one stream of responses
    responses.py    an event -> the response's tensors
    compared_answers.py    what must be equal in two answers to one request
    active.py       running requests by tenant and the client's id, for `stop`
    gauges.py       engine statistics -> `nv_trt_llm_*`
    backend.py      the backend and its only instance
    triton_model.py the same in a Triton server, behind its Python backend
"""

from llmserve.backends.tensorrtllm.backend import TensorrtLlmBackend

__all__ = ["TensorrtLlmBackend"]
