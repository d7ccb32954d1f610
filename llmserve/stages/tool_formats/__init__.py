"""Formats of tool calls, one file each; a checkpoint's chat template shows which one it uses.

tool_format   the interfaces: a tool, and a format
json_calls    calls that are JSON objects, read as they grow
marked_calls  calls between special tokens: DeepSeek's and Kimi's
grammars      rules of a guide that all formats need
registry      finds the format of a chat template
"""
