"""The web page at `/`: `assets/` is plain HTML, CSS and ES modules, which `web_page.py` serves."""
