"""Sphinx's settings. The pages ask no other host for anything: Furo has its styles and scripts with it."""

project = "llmserve"
html_title = "llmserve"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # as on the pages of a repository: `serve.md#structured-output`
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"
