"""The data of the suites in eval/: python -m tools.eval_data choices|long-documents|signatures OUTPUT

The files in eval/data were made once and stay as they are, so that numbers remain comparable. Choices come from
eval/data/docstrings.jsonl and are the same wherever they are made; the others come from the sources of the standard
library of the Python that makes them.
"""
