"""How `--target cuda` builds.

options.py    which GPUs
tiles.py      shapes of tiles, and how sums are divided
recorder.py   what is written down: launches, kernels, tensors, scratch memory
values.py     where values and weights are: what the parts of the lowering share
products.py   linear layers, and what is fused into them
integers.py   weights of few bits, as kernels read them
attention.py  rotations, the cache write, attention
streams.py    ops of several streams of a token
states.py     ops with a state, and where it lies in a slot
lowering.py   Program -> all of this, in order
compiler.py   kernels -> binaries, in processes of their own
target.py     the engine file
"""
