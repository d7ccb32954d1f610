"""Reads quantized Hugging Face checkpoints: float weights under the original names.

One file per format. `config` finds the format of a folder. A format finds the tensors of each linear module's weight;
all checks happen then, before a weight is read. `scaled_rows` expands rows when they are requested.
"""
