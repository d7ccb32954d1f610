"""Builds engine files of the embedded engine, `llmserve.engine.cpu`.

options.py      options that only this target has (none)
target.py       problems, sizes, and the engine file
lowering.py     a Program to device ops with planned buffers
large_pages.py  the file in large pages of the file cache
"""
