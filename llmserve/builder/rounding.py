"""Prepares weights, and learns about their inputs, before they are rounded to few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmserve.builder.calibration.activations import Inputs, Watched, watch_inputs, watched_names
from llmserve.builder.calibration.feedback import Shares, shares_of
from llmserve.builder.digest import tensor_digest
from llmserve.builder.equalization import Equalization, MeasuredSizes, equalize, names_read
from llmserve.builder.head_equalization import equalize_heads
from llmserve.builder.pieces import Each, Weight
from llmserve.builder.resolve import ResolvedBuild
from llmserve.progress import Progress


@dataclass(frozen=True, slots=True)
class Rounding:
    load: Callable[[str], Weight]  # equalized parameters
    equalization: Equalization
    shares: Mapping[str, Shares] = field(default_factory=dict)
    calibration: str = ""  # digest of the text

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of everything that determines how the checkpoint's numbers are rounded."""
        found = {f"{name}.shares": tensor_digest(shares) for name, shares in self.shares.items()}
        text = {"calibration": self.calibration} if self.calibration else {}
        return {**self.equalization.digests, **found, **text}


def prepare_rounding(build: ResolvedBuild, progress: Progress, each: Each) -> Rounding:
    """Measures and equalizes weights that are quantized, if any. Kept integers and their columns do not change."""

    def load(name: str) -> Weight:
        return build.weights.rows(name, build.options.dtype)

    def count(name: str, num_elements: int) -> None:
        progress.advance(name, build.options.floats.num_bytes(num_elements))

    if not build.target.rounds_activations:
        return Rounding(load, Equalization({}, {}))
    rounds_heads = build.target.cache_format(build.options).is_rounded
    heads = equalize_heads(build.program, load, each) if rounds_heads else {}
    # Columns of a matrix whose rows are looked up are columns of every value that follows.
    quantized = build.quantized.keys() - build.kept - build.looked_up
    if not quantized:
        equalization = Equalization({}, {}).with_rows(heads)
        return Rounding(equalization.apply(load), equalization)
    sizes = {param.name: build.options.floats.num_bytes(param.num_elements) for param in build.params}
    watched = Watched({}, {})
    if build.calibration:
        progress.phase("calibrate", sum(sizes[name] for name in watched_names(build.program)))
        texts = build.calibration.texts
        watched = watch_inputs(build.program, texts, load, advance=count, each=each, rounded=quantized)
    progress.phase("equalize", sum(sizes[name] for name in names_read(build.program, quantized)))
    peaks = {name: found.peaks for name, found in watched.inputs.items()}
    measured = MeasuredSizes(peaks, build.options.weights.least_exponent) if peaks else None
    equalization = equalize(build.program, quantized, load, progress.advance, each, measured).with_rows(heads)
    equalized = equalization.apply(load)
    if not build.calibration:
        return Rounding(equalized, equalization)
    inputs = {name: found for name, found in watched.inputs.items() if name in quantized}
    shares = {**_shares(inputs, equalization, each), **watched.of_experts}
    return Rounding(equalized, equalization, shares, build.calibration.sha256)


def _shares(inputs: Mapping[str, Inputs], equalization: Equalization, each: Each) -> Mapping[str, Shares]:
    """Matrices with the same input have the same shares; the same factors divide all of them."""
    readers = {id(found.moments): name for name, found in inputs.items()}

    def of_reader(name: str) -> Shares:
        factors = equalization.columns.get(name)
        return shares_of(inputs[name].moments if factors is None else inputs[name].divided(factors).moments)

    made = dict(zip(readers, each(of_reader, readers.values()), strict=True))
    return {name: made[id(found.moments)] for name, found in inputs.items()}
