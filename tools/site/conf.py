"""Sphinx's settings. Pages load nothing from other hosts: Furo includes its styles and scripts."""

project = "llmserve"
html_title = "llmserve"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # as in a repository's pages: `serve.md#structured-output`
html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"
