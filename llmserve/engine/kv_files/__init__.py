"""KV blocks that outlive the process: evicted blocks are kept in files, where later prompts find them.

block_files.py  a folder of blocks and states, one file each
keeper.py       reads and writes the files of one engine during its steps
"""
