"""Reading a Hugging Face folder: weight files of every layout, and the plan from tensors to parameters."""
