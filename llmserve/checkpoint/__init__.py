"""Reads checkpoints: weight files in every layout, and the plan from tensors to parameters."""
