"""Builds engines for `--target cuda`.

options.py    which GPUs
tiles.py      shapes of tiles, and how sums are divided
recorder.py   records launches, kernels, tensors and scratch memory
values.py     places of values and weights, shared by all parts of the lowering
products.py   linear layers, and ops that are fused into them
integers.py   weights of few bits, in the kernels' layout
attention.py  rotations, the cache write, attention
streams.py    ops of several streams of a token
states.py     ops with a state, and its place in a slot
lowering.py   lowers a Program op by op, with all of these
compiler.py   kernels -> binaries, in separate processes
target.py     the engine file
"""
