"""What `make check-gpu` and `make check-cuda` do, step by step.

steps.py    a step, what became of it, and the order of steps
checks.py   the steps that both have
tensorrt_llm.py, cuda.py  the steps of one, and the order of its steps
program.py  one process that may fail, hang or crash
names.py    in a process of its own: an installed TensorRT-LLM beside the names that we use
speed.py    in a process of its own: tokens per second of an engine
bandwidth.py  in a process of its own: what a GPU can do at most
speed_of_networks.py  what is measured of networks of random numbers
page.py     the report for people
"""
