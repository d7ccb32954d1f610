"""Engines as workers of NVIDIA Dynamo: what its front ends, its router and its discovery want of one."""
