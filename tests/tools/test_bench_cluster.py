"""`make bench-cluster`: real workers behind both routers, with few prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import CHECKPOINT, llmserve
from tools.bench_cluster import make_prompts, measure
from tools.cluster.local import is_there


def test_prompts_share_beginnings_and_nothing_else() -> None:
    prompts = make_prompts(3, 20, 30)
    assert len({prompt[:60] for prompt in prompts}) == 3
    assert len(set(prompts)) == 30
    assert prompts == make_prompts(3, 20, 30)


@pytest.mark.skipif(not is_there(), reason="there is no .venv-cluster: make cluster-env")
def test_prompts_go_where_their_beginnings_are(tmp_path: Path) -> None:
    done = llmserve("build", str(CHECKPOINT), "--dtype", "float16", "--output-dir", str(tmp_path / "engine"))
    assert done.returncode == 0, done.stderr
    prompts = make_prompts(4, 100, 32)
    kv, turns = (measure(tmp_path / "engine", router, prompts, 1024) for router in ("kv", "round-robin"))
    assert kv.hit_rate > turns.hit_rate
    assert 0 < kv.median_ms <= kv.p99_ms
