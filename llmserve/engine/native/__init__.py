"""libllmserve_cpu.so, for all of llmserve's engines: the CPU engine computes with it, and all choose tokens with it.

library.py   its functions
step.py      converts a StepPlan to its arrays
masks.py     masks of structured answers, made during a step
choosers.py  tokens from logits that were computed elsewhere
"""
