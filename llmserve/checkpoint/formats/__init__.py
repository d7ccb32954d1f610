"""Quantized Hugging Face checkpoints: what their tensors stand for, as float weights under the names of the original.

One file per format. `config` finds out which one a folder has, a format says of each linear module which tensors are
its weight (all checks are made then, before a weight is read), and `scaled_rows` expands rows when they are asked for.
"""
