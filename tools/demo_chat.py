"""Runs a trained network that answers in Chinese: pull, build in int8, serve, ask, and open the page.

Run it through `make demo-chat`. Each step prints its command first; the script stops at the first one that fails.
"""

from __future__ import annotations

import sys
import time
import webbrowser

from tools.demo import llmserve, served

NAME = "qwen2.5-coder-0.5b-instruct"
CHECKPOINT = f"models/{NAME}.gguf"
ENGINE = f"engines/{NAME}-int8"
QUESTION = "用 Python 写一个函数，判断一个字符串是不是回文，并用中文简单解释。"


def main() -> None:
    started = time.monotonic()
    llmserve("Download the checkpoint", "pull", NAME)
    llmserve("Build an engine from it", "build", CHECKPOINT, "--quantization", "int8", "--output-dir", ENGINE)
    with served(ENGINE) as server:
        llmserve(
            "Stream one answer over gRPC",
            "chat",
            "--url",
            server.grpc,
            "--temperature",
            "0",
            "--max-tokens",
            "512",
            "--once",
            QUESTION,
        )
        print(f"\n\033[1mAnswered after {time.monotonic() - started:.0f} s.\033[0m", flush=True)
        if sys.stdin.isatty():
            webbrowser.open(f"http://{server.http}/")
            input(f"The page is at http://{server.http}/ until you press Enter: ")


if __name__ == "__main__":
    main()
