"""llmserve: compile a Hugging Face checkpoint into an engine, serve it like Triton, and check its quality."""

__version__ = "0.1.0"
