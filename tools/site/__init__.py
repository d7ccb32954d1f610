"""The documentation as a site: `make docs`. The guides are its pages as they are; what is generated is in no commit.

__main__.py  the command: pages into a folder, Sphinx over it, every warning an error
pages.py     which files are pages, and in which part of the site they stand
api.py       the API reference, from OpenAI's schema and the tables of Triton's routes
commands.py  every command's help
conf.py      Sphinx's settings
"""
