"""`make fuzz`: every target for its share of the time, all of them whatever one finds.

python -m tests.fuzz --seconds 60 [TARGET ...]
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.file_targets import file_targets
from tests.fuzz.target import Finding, fuzz
from tests.fuzz.wire_targets import body_targets, real_server, wire_targets


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("targets", nargs="*")
    arguments = parser.parse_args()
    num_findings = 0
    with real_server() as server:
        targets = {target.name: target for target in (*wire_targets(server), *body_targets(), *file_targets())}
        chosen = arguments.targets or list(targets)
        if unknown := [name for name in chosen if name not in targets]:
            parser.error(f"no target {', '.join(unknown)}; there are {', '.join(targets)}")
        for name in chosen:
            try:
                for path in targets[name].corpus:
                    targets[name].check(path.read_bytes())
                num = fuzz(targets[name], arguments.seconds / len(chosen), first_round=time.time_ns())
                print(f"{name:12} {num} inputs", flush=True)
            except Finding as finding:
                num_findings += 1
                print(f"{name:12} FOUND {finding}", flush=True)
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
