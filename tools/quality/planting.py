"""Plants outliers like those of trained networks into a network that has none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.quality.tensors import Array, Network

NORM_CHANNELS = 2  # of each norm
UP_CHANNELS = 4  # of each up-projection
SINK_CHANNELS = 2  # of the residual


@dataclass(frozen=True, slots=True)
class Planted:
    """Multiplies channels by a factor from `least` to `most`, and divides their readers' weights: the same function."""

    least: float
    most: float
    seed: int

    def apply(self, network: Network) -> Network:
        rng = np.random.default_rng(self.seed)
        tensors = {name: array.copy() for name, array in network.tensors.items()}
        for maker, readers, count in _makers(network.num_layers):
            channels = rng.choice(len(tensors[maker]), count, replace=False)
            factors = np.exp(rng.uniform(np.log(self.least), np.log(self.most), count)).astype(np.float32)
            _scale(tensors, maker, readers, dict(zip(channels.tolist(), factors.tolist(), strict=True)))
        return replace(network, tensors=tensors)


def _makers(num_layers: int) -> Iterator[tuple[str, Sequence[str], int]]:
    """Yields parameters that produce channels, the matrices that read them, and how many channels are scaled."""
    for number in range(num_layers):
        layer = f"model.layers.{number}"
        attention = [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        mlp = [f"{layer}.mlp.{part}_proj.weight" for part in ("gate", "up")]
        yield f"{layer}.input_layernorm.weight", attention, NORM_CHANNELS
        yield f"{layer}.post_attention_layernorm.weight", mlp, NORM_CHANNELS
        yield f"{layer}.mlp.up_proj.weight", [f"{layer}.mlp.down_proj.weight"], UP_CHANNELS


def _scale(tensors: Mapping[str, Array], maker: str, readers: Sequence[str], factors: Mapping[int, float]) -> None:
    """Scales channels in place."""
    for channel, factor in factors.items():
        tensors[maker][channel] *= np.float32(factor)
        for reader in readers:
            tensors[reader][:, channel] /= np.float32(factor)


@dataclass(frozen=True, slots=True)
class Sinks:
    """Gives some tokens huge embeddings in a few channels, so that only their positions have a huge residual, like the
    first tokens of trained networks. This changes the function, so it has its own baseline."""

    token_ids: tuple[int, ...]
    least: float  # absolute value in those channels, relative to the root mean square of the table
    most: float
    seed: int

    def apply(self, network: Network) -> Network:
        name = "model.embed_tokens.weight"
        rng = np.random.default_rng(self.seed)
        table = network.tensors[name].copy()
        size = np.sqrt(np.square(table, dtype=np.float64).mean())
        channels = rng.choice(table.shape[1], SINK_CHANNELS, replace=False)
        for token in self.token_ids:
            signs = rng.choice((-1.0, 1.0), SINK_CHANNELS)
            table[token, channels] = signs * size * np.exp(rng.uniform(np.log(self.least), np.log(self.most)))
        return replace(network, tensors={**network.tensors, name: table})

    def mark(self, ids: Sequence[int]) -> list[int]:
        """Returns `ids` with the tokens spread over them, the first one at the beginning."""
        step = -(-len(ids) // len(self.token_ids))
        pieces = [ids[begin : begin + step] for begin in range(0, len(ids), step)]
        return [
            token for sink, piece in zip(self.token_ids, pieces, strict=False) for token in (sink, *piece)
        ]  # fmt: skip
