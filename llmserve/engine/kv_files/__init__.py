"""KV blocks that outlive the process: what falls out of the pool is kept in files, and found there by later prompts.

block_files.py  a folder of blocks, and of states, each a file that says what it is
keeper.py       what one engine keeps there and takes from there, beside its steps
"""
