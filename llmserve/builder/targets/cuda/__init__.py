"""How `--target cuda` builds.

options.py   which GPUs
tiles.py     shapes of tiles, and how sums are divided
lowering.py  Program -> launches, kernels, buffers, tensors
compiler.py  kernels -> binaries, in processes of their own
target.py    the engine file
"""
