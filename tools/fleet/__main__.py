"""Computes how many replicas a load needs. It simulates them with speeds from `make bench`: `make plan-fleet`.

    python -m tools.fleet --rate 2 --first-token 4 --between-tokens 0.2
    python -m tools.fleet --trace conversation_trace.jsonl --first-token 4 --between-tokens 0.2

The simulator and its router are Dynamo's. Requests are drawn from the statistics of a public trace (--kind), or read
from a trace in Mooncake's format. A row shows how many replicas meet the limits, and the effects of two events: one
replica is missing for a while, or the load doubles and new replicas start only later.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.benchmark.markdown import table
from tools.fleet import traffic
from tools.fleet.costs import StepCosts
from tools.fleet.simulated import Fleet, Limits, Outcome, Replica

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs/benchmarks/engine-2x-avx512.json"
HEADER = ("requests/s", "replicas", "round-robin", "in cache", "round-robin", "first token, s", "between, s", "within",
          "one gone", "late growth")  # fmt: skip


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--report", type=Path, default=REPORT, help="of make bench (JSON), on a machine like the replicas'")
    add("--shape", default="0.4b", help="network in that report")
    add("--precision", default="int8", help="precision in that report")
    add("--rate", type=float, nargs="+", default=[2.0], help="requests a second, on average; one row each")
    add("--minutes", type=float, default=10.0, help="of requests in each row")
    add("--kind", choices=sorted(traffic.KINDS), default="conversation", help="public trace for lengths")
    add("--prefixes", type=int, default=0, help="prompts begin with one of so many prefixes")
    add("--prefix-tokens", type=int, default=512, help="length of each prefix")
    add("--trace", type=Path, help="requests of this file (Mooncake's JSON lines), at its own rate")
    add("--trace-block", type=int, default=512, help="tokens of a block in the trace")
    add("--first-token", type=float, required=True, help="seconds until the first token, at most")
    add("--between-tokens", type=float, required=True, help="seconds between two tokens, at most")
    add("--share", type=float, choices=(0.5, 0.9, 0.95, 0.99), default=0.95, help="of requests within both limits")
    add("--most", type=int, default=2000, help="replicas to try")
    add("--max-batch-size", type=int, default=32, help="sequences in one step of a replica")
    add("--max-num-tokens", type=int, default=2048, help="tokens in one step of a replica")
    add("--max-seq-len", type=int, default=8192, help="prompt and answer of one sequence")
    add("--kv-tokens", type=int, default=65536, help="tokens in the KV cache of a replica")
    add("--gone-s", type=float, default=60.0, help="how long a lost replica is gone")
    add("--start-s", type=float, default=60.0, help="from the wish for a replica until it serves")
    given = parser.parse_args(arguments)
    wrong = [f"--{name.replace('_', '-')} {value} must be more than 0" for name, value in vars(given).items()
             if isinstance(value, (int, float)) and value <= 0 and name != "prefixes"]  # fmt: skip
    wrong += [f"--rate {rate} must be more than 0" for rate in given.rate if rate <= 0]
    if wrong:
        parser.error("; ".join(wrong))
    return given


def row(fleet: Fleet, requests: Sequence[traffic.Request], given: argparse.Namespace) -> list[str]:
    lasts_s = requests[-1].at_s
    rate = f"{len(requests) / lasts_s:.3g}"
    needed, by_turns = (fleet.fewest(router, most=given.most) for router in ("kv", "round-robin"))
    if needed is None:
        best = fleet.outcome(given.most)
        return [rate, f"more than {given.most}", "", f"{best.cached:.0%}", "", *_times(best), "", ""]
    kept, turns = fleet.outcome(needed), fleet.outcome(by_turns or given.most, "round-robin")
    middle = lasts_s / 2
    gone = [(middle, needed - 1), (middle + given.gone_s, needed)]
    one_gone = f"{fleet.outcome(needed, change=gone).within:.1%}" if needed > 1 else "none left"
    half = max(needed // 2, 1)
    late = fleet.outcome(half, change=[(lasts_s / 10, needed)], starts_in_s=given.start_s).within
    return [rate, str(needed), str(by_turns or f"more than {given.most}"), f"{kept.cached:.0%}", f"{turns.cached:.0%}",
            *_times(kept), one_gone, f"{late:.1%}"]  # fmt: skip


def _times(found: Outcome) -> list[str]:
    return [f"{found.first_token_s:.2f}", f"{found.between_tokens_s:.3f}", f"{found.within:.1%}"]


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    try:
        costs = StepCosts.of_report(given.report, given.shape, given.precision)
        replica = Replica(costs, given.max_batch_size, given.max_num_tokens, given.kv_tokens, given.max_seq_len)
        limits = Limits(given.first_token, given.between_tokens, given.share)
        if given.trace:
            loads = [traffic.read(given.trace)]
        else:
            kind, seconds = traffic.KINDS[given.kind], 60 * given.minutes
            prefixes = {"num_prefixes": given.prefixes, "prefix_tokens": given.prefix_tokens}
            loads = [
                traffic.drawn(kind, rate, ceil(rate * seconds), max_tokens=given.max_seq_len, **prefixes)
                for rate in given.rate
            ]
    except (OSError, ValueError) as error:
        print(f"plan-fleet: {error}", file=sys.stderr)
        return 2
    if find_spec("dynamo") is None:
        print("plan-fleet needs NVIDIA Dynamo: run it with make plan-fleet FLEET_ARGS=...", file=sys.stderr)
        return 2
    rows = []
    for requests in loads:
        with TemporaryDirectory(prefix="llmserve-fleet-") as folder:
            block = given.trace_block if given.trace else traffic.BLOCK
            rows.append(row(Fleet(Path(folder), replica, requests, limits, block=block), requests, given))
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
