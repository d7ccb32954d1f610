"""Rebuild the demo checkpoint from the docstrings of installed packages. No network is used.

    python -m tools.train_demo_checkpoint train --output /tmp/demo --minutes 60
    python -m tools.train_demo_checkpoint score build/checkpoints/baichuan2-tiny-docsum

Training pairs come from this interpreter's standard library and site-packages and from every `--packages DIR`; pairs
near an evaluation pair are dropped. For a larger corpus, install the packages in
tools/demo_checkpoint/corpus-packages.txt into a separate environment, and give its site-packages with `--packages`.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from tools.demo_checkpoint import corpus
from tools.demo_checkpoint.decontaminate import Decontaminator

REPOSITORY = Path(__file__).resolve().parent.parent
EVALUATION_PAIRS = REPOSITORY / "eval" / "data" / "docstrings.jsonl"
PAIRS_PER_PACKAGE = 2000
STANDARD_LIBRARY_REPEATS = 2  # the same kind of text as the evaluation pairs, but rare: 2 % of the pairs
EVALUATION_PAIRS_PER_PACKAGE = 25
STANDARD_LIBRARY = "py" + sysconfig.get_python_version()  # the origin in a pair's id

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Packages = Annotated[list[Path] | None, typer.Option(help="A further folder of packages; may be repeated.")]
Seed = Annotated[int, typer.Option(help="Of the choice of pairs and of the training.")]


@app.command()
def pairs(output: Path, packages: Packages = None, seed: Seed = 0) -> None:
    """Write the training pairs as JSON lines."""
    found = training_pairs([Path(sysconfig.get_path("purelib")), *(packages or [])], seed)
    corpus.write_pairs(output, found)


@app.command()
def eval_pairs(output: Path, count: int = 500, seed: Seed = 0) -> None:
    """Choose evaluation pairs from the standard library. The committed file was chosen once and stays as it is."""
    library = corpus.collect([Path(sysconfig.get_path("stdlib"))], STANDARD_LIBRARY)
    chosen = corpus.select_evaluation_pairs(library, count, per_package=EVALUATION_PAIRS_PER_PACKAGE, seed=seed)
    corpus.write_pairs(output, chosen)
    print(f"{len(chosen)} evaluation pairs in {output}")


@app.command()
def train(
    output: Annotated[Path, typer.Option(help="A folder for the corpus, the tokenizer and `checkpoint/`.")],
    minutes: Annotated[float, typer.Option(help="Training time; the learning rate follows the clock.")] = 60.0,
    steps: Annotated[
        int,
        typer.Option(
            help="Train this many steps instead: repeatable to the bit, and the same "
            "command goes on where an interrupted run saved itself."
        ),
    ] = 0,
    device: str = "cpu",
    threads: int = 2,
    autocast: Annotated[bool, typer.Option(help="bfloat16 arithmetic; faster where the processor has it.")] = False,
    compile: Annotated[
        bool, typer.Option(help="torch.compile the loss; time both, it depends on the machine.")
    ] = False,
    packages: Packages = None,
    seed: Seed = 0,
) -> None:
    """Collect a corpus, train the tokenizer and the model, export and score the checkpoint."""
    from tools.demo_checkpoint import batches, export, model, tokenizer
    from tools.demo_checkpoint import train as training

    corpus_file = output / "pairs.jsonl"
    if not corpus_file.exists():
        pairs(corpus_file, packages, seed)
    found = corpus.read_pairs(corpus_file)
    tokenizer.train_tokenizer(found, output / "tokenizer.model", threads=threads)
    examples = batches.encode_pairs(found, tokenizer.load_tokenizer(output / "tokenizer.model"))
    print(f"{len(examples)} examples, {sum(len(example.ids) for example in examples)} tokens", flush=True)
    options = training.TrainOptions(
        minutes=minutes, steps=steps, device=device, threads=threads, seed=seed, autocast=autocast, compile=compile,
        state=output / "state.pt",
    )  # fmt: skip
    trained, _ = training.train(examples, model.ModelConfig(), options, say=lambda line: print(line, flush=True))
    export.export_checkpoint(trained, output / "tokenizer.model", output / "checkpoint")
    score([output / "checkpoint"])


@app.command()
def score(checkpoints: list[Path]) -> None:
    """Print ROUGE of greedy summaries of the evaluation pairs."""
    from tools.demo_checkpoint import score as scoring

    evaluation = corpus.read_pairs(EVALUATION_PAIRS)
    for checkpoint in checkpoints:
        result = scoring.rouge(scoring.summaries(checkpoint, evaluation), evaluation)
        print(f"{checkpoint}: " + "  ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True)


def training_pairs(roots: list[Path], seed: int) -> list[corpus.Pair]:
    """Returns clean pairs, distinct and unlike the evaluation pairs, with a limit per package.

    Pairs of the standard library, which does not have to be among the roots, are repeated.
    """
    library = list(corpus.collect([Path(sysconfig.get_path("stdlib"))], STANDARD_LIBRARY))
    raw = [*library, *corpus.collect(roots, "package")]
    distinct = corpus.deduplicate(raw)
    decontaminator = Decontaminator(corpus.read_pairs(EVALUATION_PAIRS))
    kept = corpus.cap_per_package((p for p in distinct if not decontaminator.is_near(p)), PAIRS_PER_PACKAGE, seed)
    num_packages = len({pair.package for pair in kept})
    print(f"{len(raw)} pairs, {len(distinct)} distinct, {len(kept)} kept from {num_packages} packages", flush=True)
    repeated = [pair for pair in kept if pair.id.startswith(f"{STANDARD_LIBRARY}:")]
    return kept + repeated * (STANDARD_LIBRARY_REPEATS - 1)


if __name__ == "__main__":
    app()
