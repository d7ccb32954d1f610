"""Builds the documentation as a website: `make docs`. Guides are its pages. Generated pages are in no commit.

__main__.py  the command: copies pages into a folder and runs Sphinx, with warnings as errors
pages.py     which files are pages, and their part of the site
api.py       the API reference, from OpenAI's schema and the tables of Triton's routes
commands.py  every command's help
conf.py      Sphinx's settings
"""
