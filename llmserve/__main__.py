"""`python -m llmserve`: the command, where no folder of scripts is in PATH."""

from __future__ import annotations

from llmserve.cli.main import main

if __name__ == "__main__":
    main()
