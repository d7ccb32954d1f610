"""Builds what TensorRT-LLM compiles (1.2) or loads (1.3 and newer).

target.py      problems, sizes, and which of the two modes builds
options.py     flags of trtllm-build
checkpoint.py  engine mode: a checkpoint of TensorRT-LLM's
shards.py      which rows or columns of a parameter each rank has
ranks.py       engine mode: one process and one GPU compiles each rank
canonical.py   LLM mode: a Hugging Face checkpoint in canonical form
"""
