"""What a fleet is simulated with: an engine's measured costs, and requests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools.fleet.__main__ import REPORT, main
from tools.fleet.costs import StepCosts
from tools.fleet.traffic import BLOCK, KINDS, drawn, lines, read


def test_costs_are_those_of_the_report() -> None:
    costs = StepCosts.of_report(REPORT, "0.4b", "int8")
    rows = {row["cell"]: row["tokens_per_s"]["median"] for row in json.loads(REPORT.read_text())["rows"]
            if (row["shape"], row["precision"]) == ("0.4b", "int8")}  # fmt: skip
    assert costs.prompt_token_s == 1 / rows["prefill 512"]
    assert costs.step_s[16] == 16 / rows["batch 16"]
    seconds = costs.of_batch(np.array([1.0, 10.0, 16.0, 64.0]))
    assert seconds[0] == costs.step_s[1]
    assert seconds[0] < seconds[1] < seconds[2] == costs.step_s[16]
    assert seconds[3] == pytest.approx(2 * costs.step_s[32])  # of twice the largest batch that was measured


def test_the_simulator_finds_the_costs_of_a_batch(tmp_path: Path) -> None:
    """Where it looks between two points of its grid, it is a few percent off at most."""
    costs = StepCosts(0.001, {1: 0.01, 32: 0.04})
    costs.write(tmp_path / "costs.npz", max_batch_size=32, max_tokens=4096)
    table = np.load(tmp_path / "costs.npz")
    assert np.interp(1000, table["prefill_isl"], table["prefill_ttft_ms"]) == pytest.approx(1000)
    for batch, length in ((1, 700), (5, 333), (32, 1000), (32, 4096)):
        held = np.searchsorted(table["decode_active_kv_tokens"], batch * length)
        row = table["decode_itl"][min(held, len(table["decode_itl"]) - 1)]
        found = np.interp(length, table["decode_context_length"], row)
        assert found == pytest.approx(1e3 * costs.of_batch(np.array([float(batch)]))[0], rel=0.1)


def test_requests_have_the_lengths_of_the_trace_and_share_prefixes(tmp_path: Path) -> None:
    kind = KINDS["conversation"]
    requests = drawn(kind, 5.0, 4000, max_tokens=8192, num_prefixes=4, prefix_tokens=256)
    assert requests == drawn(kind, 5.0, 4000, max_tokens=8192, num_prefixes=4, prefix_tokens=256)
    assert np.median([one.num_prompt_tokens for one in requests]) == pytest.approx(kind.prompt, rel=0.1)
    assert np.median([one.num_answer_tokens for one in requests]) == pytest.approx(kind.answer, rel=0.1)
    assert len(requests) / requests[-1].at_s == pytest.approx(5.0, rel=0.1)
    gaps = np.diff([one.at_s for one in requests])
    assert gaps.std() / gaps.mean() == pytest.approx(kind.burstiness, rel=0.15)
    assert all(len(one.blocks) == -(-one.num_prompt_tokens // BLOCK) for one in requests)
    assert all(one.num_prompt_tokens + one.num_answer_tokens <= 8192 for one in requests)
    firsts = [tuple(one.blocks[:8]) for one in requests if len(one.blocks) >= 8]
    assert set(firsts) == {tuple(range(8 * number, 8 * number + 8)) for number in range(4)}
    rest = [block for one in requests for block in one.blocks[8:]]
    assert len(rest) == len(set(rest))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines(requests)))
    again = read(path)
    assert [one.blocks for one in again] == [one.blocks for one in requests]
    assert [one.num_answer_tokens for one in again] == [one.num_answer_tokens for one in requests]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shape", "7b"], "has no speeds of 7b int8; it has 0.4b bfloat16, 0.4b float16"),
        (["--report", "none.json"], "none.json"),
        (["--trace", "bad.jsonl"], "line 2: not a request of a Mooncake trace (KeyError('input_length'))"),
        (["--trace", "empty.jsonl"], "has no requests"),
        (["--minutes", "1"], "plan-fleet needs NVIDIA Dynamo: run it with make plan-fleet"),
        (["--rate", "0", "--minutes", "-1"], "--minutes -1.0 must be more than 0; --rate 0.0 must be more than 0"),
    ],
)
def test_what_cannot_be_planned_is_said(
    flags: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]})
    (tmp_path / "bad.jsonl").write_text(f'{row}\n{{"timestamp": 1}}\n')
    (tmp_path / "empty.jsonl").write_text("")
    try:
        code = main(["--first-token", "1", "--between-tokens", "0.2", *flags])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert words in capsys.readouterr().err
