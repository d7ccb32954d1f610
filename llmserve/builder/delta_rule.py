"""Ops with a state, in numpy for the reference: token by token, from the beginning of the sequence.

Shapes in names: T tokens, N heads, K key size, V value size.
"""

# ruff: noqa: N806 - names carry shapes

from __future__ import annotations

import numpy as np

from llmserve.builder.activations import sigmoid
from llmserve.builder.quantization import Matrix
from llmserve.models.graph import Op

LEAST_LENGTH = 1e-6  # squared; keeps the length of queries and keys above zero


def convolution(op: Op, x: Matrix, weight: Matrix, bias: Matrix | None = None) -> Matrix:
    taps = int(op.number("taps"))
    before = np.concatenate((np.zeros((taps - 1, x.shape[1]), np.float32), x))
    y = np.zeros_like(x) if bias is None else np.tile(bias, (len(x), 1))
    for tap in range(taps):
        y += before[tap : tap + len(x)] * weight[:, tap]
    return y * sigmoid(y) if op.number("silu") else y


def delta_rule(op: Op, qkv: Matrix, gates: Matrix, decay: Matrix, bias: Matrix) -> Matrix:
    num_heads, num_key_heads, key_dim = (int(op.number(name)) for name in ("num_heads", "num_key_heads", "key_dim"))
    q, k, v = np.split(qkv, (num_key_heads * key_dim, 2 * num_key_heads * key_dim), axis=1)
    q_TNK, k_TNK = (_of_length_one(x, num_key_heads).repeat(num_heads // num_key_heads, axis=1) for x in (q, k))
    v_TNV = v.reshape(len(v), num_heads, -1)
    beta_TN = sigmoid(gates[:, :num_heads])
    kept_TN = np.exp(-np.exp(decay) * np.logaddexp(np.float32(0), gates[:, num_heads:] + bias))
    state_NKV = np.zeros((num_heads, key_dim, v_TNV.shape[2]), np.float32)
    y_TNV = np.empty_like(v_TNV)
    for t, k_NK in enumerate(k_TNK):
        state_NKV *= kept_TN[t, :, None, None]
        change_NV = (v_TNV[t] - np.einsum("nk,nkv->nv", k_NK, state_NKV)) * beta_TN[t, :, None]
        state_NKV += k_NK[:, :, None] * change_NV[:, None, :]
        y_TNV[t] = np.einsum("nk,nkv->nv", q_TNK[t], state_NKV)
    return (y_TNV * np.float32(key_dim**-0.5)).reshape(v.shape)


def selective_scan(op: Op, xbc: Matrix, steps: Matrix, decay: Matrix, bias: Matrix, skip: Matrix) -> Matrix:
    num_heads, num_groups, size = (int(op.number(name)) for name in ("num_heads", "num_groups", "state_size"))
    x, b, c = np.split(xbc, (op.width, op.width + num_groups * size), axis=1)
    b_TNK, c_TNK = (v.reshape(len(v), num_groups, size).repeat(num_heads // num_groups, axis=1) for v in (b, c))
    x_TNV = x.reshape(len(x), num_heads, -1)
    step_TN = np.logaddexp(np.float32(0), steps + bias)
    kept_TN = np.exp(-np.exp(decay) * step_TN)
    state_NKV = np.zeros((num_heads, size, x_TNV.shape[2]), np.float32)
    y_TNV = np.empty_like(x_TNV)
    for t, b_NK in enumerate(b_TNK):
        state_NKV *= kept_TN[t, :, None, None]
        state_NKV += b_NK[:, :, None] * (x_TNV[t] * step_TN[t, :, None])[:, None, :]
        y_TNV[t] = np.einsum("nk,nkv->nv", c_TNK[t], state_NKV) + x_TNV[t] * skip[:, None]
    return y_TNV.reshape(x.shape)


def _of_length_one(x: Matrix, num_heads: int) -> Matrix:
    heads = x.reshape(len(x), num_heads, -1)
    found: Matrix = heads / np.sqrt(np.square(heads).sum(axis=2, keepdims=True) + np.float32(LEAST_LENGTH))
    return found
