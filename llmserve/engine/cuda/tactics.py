"""Tactics of a CUDA engine: the tiles of its products.

An engine file has kernels for several tactics; `tuning.py` measures which is fastest on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from llmserve.engine.cuda.device import Device
from llmserve.engine.cuda.inputs import buckets
from llmserve.engine.cuda.layout import EngineHeader, Kernel, Launch, StepPart
from llmserve.engine.runtime import TacticChoice
from llmserve.engine.tactics import Machine, TacticCache, choose_tactic

CONSTANTS = {"FORMAT", "NUM_INPUTS", "NUM_COLUMNS", "SEGMENTS", "TILE_ROWS", "TILE_COLUMNS", "TILE_INPUTS"}
ONE_TILE_ROWS = 128  # a launch for at most so many rows has the same inputs and outputs for all


class Layer(NamedTuple):
    """Launches that differ only in their weights, for up to so many rows."""

    name: str
    rows: int


def is_product(kernel: Kernel) -> bool:
    """Whether it has everything that names of tactics and layers need."""
    return dict(kernel.constants).keys() >= CONSTANTS and "w" in dict(kernel.types)


def machine_of(device: Device) -> Machine:
    return Machine(device.name, device.architecture)


def layer_of(header: EngineHeader, launch: Launch, num_rows: int) -> Layer:
    """The layer of a launch that has tactics, for so many rows."""
    rows = launch.most_rows if launch.most_rows <= ONE_TILE_ROWS else 1 << (num_rows - 1).bit_length()
    return Layer(_described(header.kernels[launch.kernel]), rows)


def versions(header: EngineHeader, launch: Launch) -> dict[str, Launch]:
    """Variants by the names of their tactics; the build's choice comes first."""
    others = (
        launch._replace(kernel=tactic.kernel, grid=tactic.grid) for tactic in header.tactics.get(launch.kernel, ())
    )
    return {tile_of(header.kernels[each.kernel]): each for each in (launch, *others)}


def tile_of(kernel: Kernel) -> str:
    constants = dict(kernel.constants)
    shape = f"{constants['TILE_ROWS']}x{constants['TILE_COLUMNS']}"
    return f"{shape}, {kernel.num_warps} warps, {kernel.num_stages} stages"


def chosen(header: EngineHeader, launch: Launch, num_rows: int, cache: TacticCache) -> Launch:
    """The fastest variant according to the measurements."""
    if launch.kernel not in header.tactics:
        return launch
    layer = layer_of(header, launch, num_rows)
    known = versions(header, launch)
    return known[choose_tactic(list(known), next(iter(known)), layer.rows, cache.timings(*layer)).tactic]


def tuned_launches(header: EngineHeader) -> Mapping[Layer, tuple[int, list[Launch]]]:
    """Launches with several tactics, with the rows for which they are timed."""
    found: dict[Layer, tuple[int, list[Launch]]] = {}
    for launch in header.launches:
        rows = _rows_of(header, launch) if launch.kernel in header.tactics else []
        most = {layer_of(header, launch, each): each for each in rows}  # several buckets may belong to one layer
        for layer, num_rows in most.items():
            found.setdefault(layer, (num_rows, []))[1].append(launch)
    return found


def choices(header: EngineHeader, cache: TacticCache) -> dict[str, list[TacticChoice]]:
    """By layer: the tactic up to each number of rows, and the reason."""
    found: dict[str, list[TacticChoice]] = {}
    for layer, (_, launches) in tuned_launches(header).items():
        names = list(versions(header, launches[0]))
        found.setdefault(layer.name, []).append(choose_tactic(names, names[0], layer.rows, cache.timings(*layer)))
    return {name: sorted(each, key=lambda choice: choice.rows) for name, each in found.items()}


def _rows_of(header: EngineHeader, launch: Launch) -> list[int]:
    most = header.max_num_tokens if launch.part == StepPart.BODY.value else header.head_rows
    found = [rows for rows in buckets(most) if launch.least_rows <= rows <= launch.most_rows]
    return found[-1:] if launch.most_rows <= ONE_TILE_ROWS else found


def _described(kernel: Kernel) -> str:
    """The properties of a product that take time."""
    constants, types = dict(kernel.constants), dict(kernel.types)
    numbers = types["w"].lstrip("*") if constants["FORMAT"] == "float" else constants["FORMAT"]
    words = [f"{kernel.function.rpartition('.')[2]} {constants['NUM_INPUTS']} to {constants['NUM_COLUMNS']}", numbers]
    words += [f"{constants['SEGMENTS']} segments"] if "segments" in kernel.function else []
    words += [str(constants["ACTIVATION"])] if "ACTIVATION" in constants else []
    words += [name for name in ("bias", "residual") if constants.get(f"HAS_{name.upper()}")]
    return ", ".join(map(str, words))
