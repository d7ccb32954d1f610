"""GGUF, the file format of llama.cpp and ggml, as a checkpoint: header, stored numbers, names, config and tokenizer.

The format: github.com/ggml-org/ggml, docs/gguf.md. The `gguf` package of its authors reads it too. But it makes an
array of every string (4 s and 100 MB for a vocabulary of 49,000), trusts the file's counts, and includes an HTTP
client. So the header is read here, and the tests compare the result with that package.
"""
