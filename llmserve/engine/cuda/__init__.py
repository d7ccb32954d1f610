"""Engines for NVIDIA GPUs, compiled ahead of time: `--target cuda`.

layout.py    the engine file: kernels, launches, buffers, weights
layout_checks.py  checks of a file's header
kernels/     the kernels, in Triton; imported to compile them, never to run an engine
device.py    the interface to a driver; bindings.py is NVIDIA's
inputs.py    a step's data on the device
runner.py    steps: `Runner` over a device
runtime.py   the target's `Runtime`
"""
