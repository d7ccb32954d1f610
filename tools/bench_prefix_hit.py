"""Compares the time to the first token of prompts: with a cached beginning, all new, and as short as the uncached rest.

    python -m tools.bench_prefix_hit ENGINE... [--prefix 1536] [--rest 24] [--rounds 9]

A network with states finds a kept state instead of keys and values. Compare the column "hit / rest" of such a network
with that of a dense one to see what a hit costs more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing, closing
from pathlib import Path
from statistics import median

from llmserve.core import GenerateRequest, SamplingParams
from llmserve.engine.base import Engine
from llmserve.engine.open import open_engine
from llmserve.engine.settings import EngineSettings

MS = 1e3
IDS = range(100, 4000)  # ordinary tokens in any vocabulary
MAX_KV_TOKENS = 16_384
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


async def first_token_s(engine: Engine, prompt: Sequence[int]) -> float:
    began = time.perf_counter()
    async with aclosing(engine.submit(GenerateRequest("first", tuple(prompt), ONE_TOKEN))) as stream:
        await anext(stream)
    return time.perf_counter() - began


async def measured(engine: Engine, prefix: int, rest: int, rounds: int) -> Mapping[str, list[float]]:
    """Seconds of each round. A beginning is found from its third prompt on; the second one shows where it ends."""
    drawn, found = random.Random(1), defaultdict[str, list[float]](list)
    for _ in range(rounds):
        beginning = drawn.choices(IDS, k=prefix)
        for kind in ("cold", "second", "hit"):
            found[kind].append(await first_token_s(engine, [*beginning, *drawn.choices(IDS, k=rest)]))
        found["rest"].append(await first_token_s(engine, drawn.choices(IDS, k=rest)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", type=Path, metavar="ENGINE")
    parser.add_argument("--prefix", type=int, default=1536, help="tokens that are cached")
    parser.add_argument("--rest", type=int, default=24, help="tokens behind them")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print("| engine | cold, ms | hit | rest alone | hit / cold | hit / rest |\n|---|---|---|---|---|---|")
    for path in given.engines:
        with closing(open_engine(path, EngineSettings(max_kv_tokens=MAX_KV_TOKENS))) as engine:
            found = asyncio.run(measured(engine, given.prefix, given.rest, given.rounds))
        cold, hit, rest = (median(found[kind]) for kind in ("cold", "hit", "rest"))
        spread = f"{min(found['hit']) * MS:.1f}-{max(found['hit']) * MS:.1f}"
        print(
            f"| {path.name} | {cold * MS:.0f} | {hit * MS:.1f} ({spread}) | {rest * MS:.1f} | {hit / cold:.3f} "
            f"| {hit / rest:.2f} |"
        )


if __name__ == "__main__":
    main()
