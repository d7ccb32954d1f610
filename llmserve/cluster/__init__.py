"""Engines as workers of NVIDIA Dynamo: what its front ends, router and discovery require of a worker."""
