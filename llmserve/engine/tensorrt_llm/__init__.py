"""TensorRT-LLM: engines of release 1.2 through its C++ executor, and newer releases through its LLM class.

runtime.py     what the registry finds here
needs.py       what the target needs of a machine
library.py     the only module that imports tensorrt_llm (and torch, which comes with it)
names.py       every name of tensorrt_llm that we use, with its parameters: what an installed package is checked against
signatures.py  what can be called how: Python's signatures, pydantic's fields, documentation of compiled bindings
fits.py        whether an engine directory can run here, and if not, what to do
settings.py    which of an operator's settings each mode honours
sampling.py    our requests in TensorRT-LLM's words
answers.py     its tokens in ours: stop words, log-probs, usage
queue.py       how many requests may wait
statistics.py  its iteration statistics as ours
open.py        an engine directory and settings -> a running engine
executor.py    `Engine` over tensorrt_llm.bindings.executor.Executor (1.2)
llm.py         `Engine` over tensorrt_llm.LLM (1.3 and newer)
"""
