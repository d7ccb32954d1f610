"""TensorRT-LLM: engines of release 1.2 through its C++ executor, and newer releases through its LLM class.

runtime.py     the target's `Runtime`
needs.py       requirements of the target
library.py     the only module that imports tensorrt_llm (and torch, which comes with it)
names.py       every name of tensorrt_llm that we use, with its parameters: what an installed package is checked against
signatures.py  checks of calls: Python's signatures, pydantic's fields, documentation of compiled bindings
fits.py        whether an engine directory can run here, and if not, what to do
settings.py    which of an operator's settings each mode supports
sampling.py    converts our requests to TensorRT-LLM's
answers.py     converts its tokens to our events: stop words, log-probs, usage
queue.py       how many requests may wait
statistics.py  converts its iteration statistics
open.py        an engine directory and settings -> a running engine
executor.py    `Engine` over tensorrt_llm.bindings.executor.Executor (1.2)
llm.py         `Engine` over tensorrt_llm.LLM (1.3 and newer)
"""
