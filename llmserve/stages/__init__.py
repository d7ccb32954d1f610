"""The steps of the text pipeline, as plain Python: tokenizer, chat format, preprocess, generate, postprocess.

It has two callers: the model repository in `pipelines/`, whose shims convert tensors to calls, and programs that run an
engine in their own process. The server core never imports this package.
"""
