"""The `cpu` target's run-time room: the embedded engine, on this machine's processor.

runtime.py  what the registry finds here
needs.py    what the target needs of a machine
runner.py   one planned step, by the compiled kernels (kernels/)
layout.py   the engine file as records
tactics.py  how linear layers are cut, and what was measured of it
limits.py   what this machine can do at most
"""
