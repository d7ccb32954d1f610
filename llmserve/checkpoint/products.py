"""Matrices of heads over a latent (`LatentHeads`), made as products of two tensors when their rows are requested."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmserve.checkpoint.rearranged import pair_order
from llmserve.checkpoint.stored_tensor import Rows
from llmserve.models.spec import LatentHeads


class LatentProduct:
    """In float32. With the norm's weight: attention reads latents that are normed together with `rotary_dim` zeros."""

    def __init__(self, heads: LatentHeads, sources: Sequence[Rows]) -> None:
        self._heads = heads
        self._matrix, self._of_latent, self._norm = sources

    def __getitem__(self, rows: slice, /) -> NDArray[np.float32]:
        return self._reading(rows) if self._heads.reads else self._queries(rows)

    def _queries(self, rows: slice) -> NDArray[np.float32]:
        """Rows of several heads, each with the elements that are turned first."""
        width = self._heads.latent.rotary_dim + self._heads.latent.size
        wanted = [
            (head, slice(max(rows.start - head * width, 0), min(rows.stop - head * width, width)))
            for head in range(rows.start // width, -(-rows.stop // width))
        ]
        return np.concatenate([self._of_head(*each) for each in wanted])

    def _of_head(self, head: int, rows: slice) -> NDArray[np.float32]:
        latent, key_dim = self._heads.latent, self._heads.key_dim
        height, stored = key_dim + latent.rotary_dim, key_dim + self._heads.value_dim
        queries = self._matrix[head * height : (head + 1) * height].astype(np.float32)
        columns = slice(max(rows.start - latent.rotary_dim, 0), max(rows.stop - latent.rotary_dim, 0))
        keys = self._of_latent[head * stored : head * stored + key_dim][:, columns].astype(np.float32)
        keys *= self._weights[columns]
        turned = queries[key_dim:][pair_order(latent.rotary_dim, latent.rotary_dim, latent.num_paired)]
        return np.concatenate([turned[rows], keys.T @ queries[:key_dim]])

    def _reading(self, rows: slice) -> NDArray[np.float32]:
        """Columns of each head: zeros for the elements that are turned, then what reads the latent."""
        heads, latent = self._heads, self._heads.latent
        read = self._matrix[rows].astype(np.float32).reshape(-1, heads.num_heads, heads.value_dim).swapaxes(0, 1)
        found = np.zeros((read.shape[1], heads.num_heads, latent.rotary_dim + latent.size), np.float32)
        found[:, :, latent.rotary_dim :] = (read @ self._values).swapaxes(0, 1)
        return found.reshape(len(found), -1)

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        """[heads, value, latent]: all rows of the product need all of it."""
        heads = self._heads
        stored = self._of_latent[0 : heads.num_heads * (heads.key_dim + heads.value_dim)].astype(np.float32)
        return stored.reshape(heads.num_heads, -1, heads.latent.size)[:, heads.key_dim :] * self._weights

    @cached_property
    def _weights(self) -> NDArray[np.float32]:
        latent = self._heads.latent
        weights = self._norm[0 : latent.size].astype(np.float32)
        found: NDArray[np.float32] = weights * np.float32((latent.size / (latent.size + latent.rotary_dim)) ** 0.5)
        return found
