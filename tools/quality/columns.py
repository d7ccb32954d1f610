"""The columns of the table: networks and numbers of texts."""

from __future__ import annotations

from dataclasses import dataclass

from tools.quality.planting import Planted, Sinks

FIRST_FOREIGN_TEXT = 300  # of eval/data/docstrings.jsonl: earlier ones are measured, later ones train and calibrate


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained by a program of this package, which gets the folders of the base, of texts, and of the result."""

    program: str


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    title: str
    base: str  # "demo", or one of `networks.GGUF_FILES`
    num_texts: int
    num_tokens: int = 256  # of a text, at most
    joined: bool = False  # documents are concatenated, and each text has exactly this many tokens
    skipped: int = 0  # positions at the beginning of each text that are not measured
    change: Planted | Sinks | Trained | None = None
    width: int = 0  # of its MLPs, padded with zeros; 0: unchanged
    held_out: bool = False  # not used for tuning

    @property
    def is_base(self) -> bool:
        return self.change is None and not self.width

    @property
    def network(self) -> str:
        """The folder's name; columns of one network share it."""
        return self.base if self.is_base else self.name


WIDE = 768  # the demo network's MLPs have 688 channels, not a multiple of 32: llama.cpp would keep them in float16
COLUMNS = (
    Column("smollm2", "SmolLM2-135M", "smollm2", num_texts=60),
    Column("smollm2-2000", "SmolLM2-135M, after 1,000 to 2,000 tokens", "smollm2", num_texts=4, num_tokens=2000,
           joined=True, skipped=1000),
    Column("qwen2.5-coder", "Qwen2.5-Coder-0.5B", "qwen2.5-coder", num_texts=30),
    Column("demo", "demo", "demo", num_texts=120),
    Column("demo-x30", "demo x30", "demo", num_texts=120, change=Planted(30, 30, seed=0)),
    Column("demo-x100", "demo x100", "demo", num_texts=120, change=Planted(100, 100, seed=0)),
    Column("wide", "demo, 768 wide", "demo", num_texts=120, width=WIDE, held_out=True),
    Column("wide-planted", "wide, x10 to x300", "demo", num_texts=120, change=Planted(10, 300, seed=1), width=WIDE,
           held_out=True),
    Column("wide-sinks", "wide, three huge positions", "demo", num_texts=120,
           change=Sinks((1, 195, 196), 300, 1000, seed=2), width=WIDE, held_out=True),
    Column("wide-trained", "wide, trained in", "demo", num_texts=120, change=Trained("trained_in"), width=WIDE,
           held_out=True),
    Column("experts", "demo, with experts", "demo", num_texts=120, change=Trained("upcycled"), held_out=True),
    Column("smollm2-planted", "SmolLM2-135M, x10 to x300", "smollm2", num_texts=60, change=Planted(10, 300, seed=3),
           held_out=True),
)  # fmt: skip
QUICK = ("smollm2", "demo-x30")
QUICK_TEXTS = 20
