"""How models write calls of tools: a file for each form, found by a checkpoint's chat template.

tool_format   the nouns: a tool, and what a form can do
json_calls    calls that are JSON objects, read as they grow
grammars      rules of a guide that all forms need
registry      which form a chat template is of
"""
