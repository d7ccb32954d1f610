"""The steps of `make check-gpu` and `make check-cuda`.

steps.py    a step, its result, and the order of steps
checks.py   the steps that both have
tensorrt_llm.py, cuda.py  the steps of one, and their order
program.py  runs a process that may fail, hang or crash
names.py    in its own process: compares an installed TensorRT-LLM with the names that we use
speed.py    in its own process: an engine's tokens per second
bandwidth.py  in its own process: a GPU's limits
speed_of_networks.py  results for networks of random numbers
page.py     the report for people
"""
