"""Sweeps drawn: SVG that is well formed and in proportion, bars in a terminal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from llmserve.benchmark.plot import Panel, Series, bars, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_where_their_values_are() -> None:
    panel = Panel("<ms> & more", [Series("p50", [0.0, 50.0, 100.0]), Series("p99", [None, 100.0, 200.0])])
    root = ElementTree.fromstring(svg([panel, panel], [1, 2, 4], "users"))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(line) for line in lines] == [3, 2, 3, 2]
    (x1, y1), (x2, y2), (x4, y4) = [tuple(map(float, point.split(","))) for point in lines[0]]
    assert (x4 - x1) == 3 * (x2 - x1) > 0
    assert (y1 - y4) == 2 * (y1 - y2) > 0
    assert lines[1][0].split(",")[1] == lines[0][2].split(",")[1]  # 100 of both
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("<ms> & more") == 2
    assert {"p50", "p99", "users", "1", "2", "4", "0", "200"} <= set(texts)


def test_a_sweep_of_one_point_or_of_nothing_measured_is_drawn_too() -> None:
    ElementTree.fromstring(svg([Panel("x", [Series("", [None])])], [5], "users"))
    ElementTree.fromstring(svg([Panel("x", [Series("", [0.0])])], [5], "users"))


def test_bars_are_in_proportion() -> None:
    shown = bars("tokens/s", ["1", "2", "16"], [10.0, 5.0, None]).splitlines()
    assert shown[0] == "tokens/s"
    assert shown[1].count("█") == 2 * shown[2].count("█") == 30
    assert shown[1].endswith("10.0")
    assert shown[3] == "  16 -"
