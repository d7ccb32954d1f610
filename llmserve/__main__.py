"""`python -m llmserve`: the command, for when its script is not in PATH."""

from __future__ import annotations

from llmserve.cli.main import main

if __name__ == "__main__":
    main()
