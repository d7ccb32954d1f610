"""libllmserve_cpu.so, for every engine of ours: the CPU's computes with it, all choose tokens with it.

library.py   its functions
step.py      a StepPlan as the arrays that it takes
masks.py     masks of structured answers, made beside a step
choosers.py  tokens from logits that were computed elsewhere
"""
