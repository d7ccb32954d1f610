"""The data of the suites in eval/: python -m tools.eval_data choices|long-documents|signatures OUTPUT

The files in eval/data were made once and do not change, so that results remain comparable. Choices come from
eval/data/docstrings.jsonl and are the same on every machine; the others come from the sources of the running Python's
standard library.
"""
