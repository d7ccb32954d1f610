"""Engines for NVIDIA GPUs, compiled ahead of time: `--target cuda`.

layout.py    the engine file: kernels, launches, buffers, weights
layout_checks.py  whether a file's header makes sense
kernels/     the kernels, in Triton; imported to compile them, never to run an engine
device.py    the seam to a driver; bindings.py is NVIDIA's
inputs.py    a step's data, as it lies on the device
runner.py    steps: `Runner` over a device
runtime.py   the room that the registry knows
"""
