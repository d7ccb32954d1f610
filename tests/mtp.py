"""Checkpoints with a layer for drafts (`mtp.*`), and the second opinion on it.

transformers leaves these tensors out. But a network of one layer of its own class, to which the joint rows are given in
place of embeddings, is what vLLM and SGLang make of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.checkpoints import KINDS, make_checkpoint, random_tensors, write_json, write_tensors
from tests.oracle import load_oracle

Tensors = Mapping[str, NDArray[np.float32]]
ALONE = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
OWN = {"model.layers.0.": "mtp.layers.0.", "model.norm.": "mtp.norm."}


def make_mtp_checkpoint(
    path: Path, kind: str, change: Callable[[dict[str, Any]], None] = lambda tensors: None, **overrides: Any
) -> Path:
    """As `make_checkpoint`, in float32. `change` may change the tensors."""
    make_checkpoint(path, kind, **overrides)
    config = KINDS[kind] | overrides
    tensors: dict[str, Any] = random_tensors(config, dtype="float32", seed=0)
    layer = random_tensors(config | ALONE, dtype="float32", seed=1)
    tensors |= {_own(name): tensor for name, tensor in layer.items() if name not in SHARED}
    rng, width = np.random.default_rng(2), config["hidden_size"]
    for norm in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{norm}.weight"] = (0.2 * rng.standard_normal(width)).astype(np.float32)
    tensors["mtp.fc.weight"] = (rng.standard_normal((width, 2 * width)) / np.sqrt(width)).astype(np.float32)
    change(tensors)
    write_tensors(path, tensors, "safetensors")
    return path


class MtpOracle:
    """The network and its layer for drafts, in torch."""

    def __init__(self, path: Path) -> None:
        from safetensors.numpy import load_file

        self.model = load_oracle(path)
        self._tensors = load_file(path / "model.safetensors")
        alone = path.parent / f"{path.name}-layer"
        shutil.copytree(path, alone, dirs_exist_ok=True)
        write_json(alone / "config.json", json.loads((path / "config.json").read_text()) | ALONE)
        shared = {name: self._tensors[name] for name in SHARED if name in self._tensors}
        own = {stored: name for name in self._tensors for stored in (_shown(name),) if stored != name}
        write_tensors(alone, shared | {stored: self._tensors[name] for stored, name in own.items()}, "safetensors")
        self.layer = load_oracle(alone)

    def hidden(self, token_ids: Sequence[int]) -> Any:
        """What the network's head reads of each token."""
        import torch

        with torch.no_grad():
            return self.model.model(torch.tensor([list(token_ids)])).last_hidden_state

    def drafted(self, token_ids: Sequence[int], hidden: Any) -> tuple[NDArray[np.float32], Any]:
        """Logits and rows, for tokens and the rows of those before them."""
        import torch

        norm = type(self.model.model.norm)
        with torch.no_grad():
            embedded = self.model.model.embed_tokens(torch.tensor([list(token_ids)]))
            parts = []
            for name, rows in {"embedding": embedded, "hidden": hidden}.items():
                one = norm(rows.shape[-1], eps=self.model.config.rms_norm_eps)
                one.weight.copy_(torch.from_numpy(self._tensors[f"mtp.pre_fc_norm_{name}.weight"]))
                parts.append(one(rows))
            joint = torch.cat(parts, dim=-1) @ torch.from_numpy(self._tensors["mtp.fc.weight"]).T
            rows = self.layer.model(inputs_embeds=joint).last_hidden_state
            logits: NDArray[np.float32] = self.layer.lm_head(rows)[0].numpy()
        return logits, rows

    def drafts(self, token_ids: Sequence[int], count: int, begin: int = 0) -> list[int]:
        """What would be drafted after these tokens, of which those before `begin` are not looked at."""
        import torch

        tokens, rows = list(token_ids[begin + 1 :]), self.hidden(token_ids)[:, begin:-1]
        found: list[int] = []
        for _ in range(count):
            logits, made = self.drafted(tokens, rows)
            found.append(int(logits[-1].argmax()))
            tokens, rows = [*tokens, found[-1]], torch.cat((rows, made[:, -1:]), dim=1)
        return found


def _own(name: str) -> str:
    for shown, own in OWN.items():
        name = name.replace(shown, own, 1)
    return name


def _shown(name: str) -> str:
    for shown, own in OWN.items():
        name = name.replace(own, shown, 1)
    return name
