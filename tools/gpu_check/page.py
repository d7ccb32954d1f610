"""The report as a page: a table of the steps, then each step's results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from llmserve import __version__
from tools.benchmark.markdown import table
from tools.gpu_check.checks import Subject
from tools.gpu_check.steps import Details, Result, State


def page_of(subject: Subject, results: Mapping[str, Result]) -> str:
    parts = [f"# {subject.title}", f"llmserve {__version__}", *_machine(results["environment"].details)]
    rows = [[name, each.state.value, f"{each.seconds:.1f}", _first_line(each)] for name, each in results.items()]
    parts.append(table(["step", "result", "seconds", ""], rows))
    for name, result in results.items():
        found = list(_found(name, result))
        parts += [f"## {name}", *found] if found else []
    return "\n\n".join(parts) + "\n"


def _machine(doctor: Details) -> Iterator[str]:
    if "machine" not in doctor:  # the step was not run, or failed
        return
    facts = doctor["machine"]
    gpus = [f"{gpu['name']} (compute capability {gpu['compute_capability']}, driver {gpu['driver']})"
            for gpu in facts["GPUs"]]  # fmt: skip
    yield "\n".join(f"* {text}" for text in [*gpus, str(facts["processor"])])


def _first_line(result: Result) -> str:
    first, _, rest = result.reason.partition("\n")
    return (first + (" ..." if rest else "")).replace("|", "\\|")


def _found(name: str, result: Result) -> Iterator[str]:
    if "\n" in result.reason:
        yield "\n".join(f"* {line}" for line in result.reason.splitlines())
    shown = TABLES.get(name.partition("-")[0])  # of "speed-7b-int8", speed
    if result.details and shown and (result.state is State.PASSED or "output" not in result.details):
        yield from shown(result.details)
    if output := result.details.get("output"):
        yield f"```\n{output}\n```"


def _environment(details: Details) -> Iterator[str]:
    checks = details["checks"]
    yield table(["need", "", "found"], [[c["need"], "ok" if c["is_met"] else "missing", c["found"]] for c in checks])


def _names(details: Details) -> Iterator[str]:
    yield f"{details['library']}: {details['num_names']} names, {len(details['problems'])} differences"
    if details["untold"]:
        yield f"There, but they do not say what they take: {', '.join(details['untold'])}"


def _build(details: Details) -> Iterator[str]:
    size = sum(record["num_bytes"] for record in details["files"].values())
    facts = {**details["device"], "MiB": f"{size / 2**20:.1f}", "engine digest": details["engine_digest"]}
    yield table(["", ""], [[key, str(value)] for key, value in facts.items()])


def _contract(details: Details) -> Iterator[str]:
    yield ", ".join(f"{len(tests)} {outcome}" for outcome, tests in details.items())


def _evaluation(details: Details) -> Iterator[str]:
    rows = [
        [name, f"{each['baseline']:.2f}", f"{each['engine']:.2f}", f"{each['low']:+.2f} to {each['high']:+.2f}"]
        for name, each in details["metrics"].items()
    ]
    yield table(["", "Hugging Face", "engine", "95 % interval of the difference"], rows)
    rates = [f"{side} {details[side]['tokens_per_second']:,.0f} tokens/s" for side in ("baseline", "engine")]
    yield f"{details['verdict']}; {details['suite']['num_samples']} samples; {', '.join(rates)}"


def _parity(details: Details) -> Iterator[str]:
    margin = details["largest_margin"]
    worst = "" if margin is None else f"; largest margin at a first difference {margin:.3f} nat"
    yield f"the same answer in {100 * details['exact_match_rate']:.1f} % of the samples{worst}"


def _benchmark(details: Details) -> Iterator[str]:
    rows = []
    for row in details["rows"]:
        rate = row["tokens_per_s"]
        spread = f"{rate['median']:,.0f} ({rate['low']:,.0f}-{rate['high']:,.0f})"
        rows.append([str(row["batch"]), spread, f"{row['ratio']:.2f}", f"{row['first_token_ms']:.1f}"])
    yield table(["batch", "tokens/s", "times batch 1's", "first token, ms"], rows)


def _bandwidth(details: Details) -> Iterator[str]:
    rates = [f"{details['copied_bytes_per_s'] / 1e12:.2f} TB/s copied (read and written)"]
    rates += [f"{2 * rate / 1e12:.0f} TFLOP/s in {dtype}" for dtype, rate in details["products_per_s"].items()]
    yield ", ".join(rates)


def _speed(details: Details) -> Iterator[str]:
    rows = [
        [row["cell"], f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.2f}",
         "" if row["of_the_bound"] is None else f"{row['of_the_bound']:.2f}",
         f"{row['of_the_peer']:.2f}" if "of_the_peer" in row else ""]
        for row in details["rows"]
    ]  # fmt: skip
    yield table(["", "tokens/s", "ms", "of the bound", "times transformers"], rows)
    yield f"opened in {details['open_seconds']:.1f} s"
    waits = [
        [str(row["batch"]), f"{row['device_ms']:.2f}", f"{row['engine_ms']:.2f}", f"{100 * row['idle_share']:.0f} %"]
        for row in details.get("idle", ())
    ]
    if waits:
        yield table(["batch", "a step on the device, ms", "in the engine, ms", "the GPU waits"], waits)


def _law(details: Details) -> Iterator[str]:
    rows = [[row["case"], f"{row['differ']} of {row['rows']}", f"{row['largest']:.2g}"] for row in details["law"]]
    yield table(["one sequence, compared with it alone in one chunk", "rows of logits that differ", "by at most"], rows)


def _layers(details: Details) -> Iterator[str]:
    yield from _law(details)
    yield f"{details['layers']} layers were measured. A network of {details['of_the_whole']} is extrapolated from them."
    rows = [
        [str(row["batch"]), str(row["context"]), f"{row['body_ms']:.3f}", f"{row['head_ms']:.3f}",
         f"{row['body_bytes'] / row['body_ms'] / 1e9:.2f}", f"{row['whole_ms']:.2f}"]
        for row in details["decode"]
    ]  # fmt: skip
    yield table(["batch", "context", "layers, ms", "head, ms", "TB/s", "whole network, ms (extrapolated)"], rows)
    flops = 2 * details["layer_products"] * details["layers"] / details["of_the_whole"]
    prompts = [
        [str(row["tokens"]), f"{row['ms']:.2f}", f"{flops * row['tokens'] / row['ms'] / 1e9:.0f}"]
        for row in details["prompts"]
    ]
    yield table(["prompt, tokens", "step, ms", "TFLOP/s of products"], prompts)


def _states(details: Details) -> Iterator[str]:
    yield details["selftest"]
    yield from _law(details)
    yield table(["batch", "a step, ms"], [[str(row["batch"]), f"{row['ms']:.3f}"] for row in details["decode"]])
    prompts = [[str(row["tokens"]), f"{row['ms']:.2f}"] for row in details["prompts"]]
    yield table(["prompt, tokens", "step, ms"], prompts)


def _serving(details: Details) -> Iterator[str]:
    rows = [
        [str(row["concurrency"]), f"{row['tokens_per_s']:,.0f}", f"{row['first_token_ms']:.1f}"]
        for row in details["rows"]
    ]
    yield table(["streams over gRPC", "tokens/s", "first token, ms"], rows)


TABLES: Mapping[str, Callable[[Details], Iterator[str]]] = {
    "environment": _environment,
    "names": _names,
    "build": _build,
    "contract": _contract,
    "evaluation": _evaluation,
    "parity": _parity,
    "benchmark": _benchmark,
    "bandwidth": _bandwidth,
    "speed": _speed,
    "law": _law,
    "layers": _layers,
    "states": _states,
    "peer": _speed,
    "serving": _serving,
}
