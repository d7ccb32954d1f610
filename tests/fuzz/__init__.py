"""Structure-aware fuzzing of whatever reads bytes that nobody here wrote: `make fuzz`.

A target turns bytes into work, and says what its well-formed bytes look like. Hypothesis draws those and damages them;
what it finds is made small and becomes a file of `corpus/`, which every run of the tests replays.
"""
