"""The embedded engine, on this machine's processor: the run-time side of the `cpu` target.

runtime.py  the target's `Runtime`
needs.py    what the target needs of a machine
runner.py   one planned step, by the compiled kernels (kernels/)
layout.py   the engine file as records
tactics.py  how linear layers are tiled, and the measured times
limits.py   the maximum speed of this machine
"""
