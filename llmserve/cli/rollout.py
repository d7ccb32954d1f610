"""`llmserve rollout`: compares a candidate version or adapter with the served one, and promotes or rolls it back."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmserve.cli.client_options import ApiKeyOption, RootCertificatesOption
from llmserve.cli.dataclass_command import DataclassCommand, argument, option
from llmserve.cli.pipelines import ENGINE_PATH, TOKENIZER_PATH
from llmserve.errors import InvalidArgument, raise_problems

if TYPE_CHECKING:
    from llmserve.cli.rollout_client import RolloutClient

ENDS = ("promoted", "rolled_back", "failed")
POLL_S = 0.5
rule_option = partial(option, panel="Rules, instead of those in the model's config")


class Action(StrEnum):
    START = "start"
    STATUS = "status"
    PROMOTE = "promote"
    ABORT = "abort"


@dataclass(frozen=True)
class RolloutOptions:
    action: Action = argument(..., "What to do.")
    model: str = argument("", "The model; status without one shows all.")
    url: str = option("http://localhost:8000", "The server's HTTP port.")
    engine: Path | None = option(None, "start: an engine directory, as the server sees it.")
    version: str = option("", "start: a version in the repository.", show_default="the newest")
    adapter: str = option("", "start: NAME=DIR, another adapter directory for a loaded adapter's name.")
    shadow: str | None = rule_option(None, "Share of requests to copy, such as 10%.")
    canary: str | None = rule_option(None, "Shares that the candidate answers, such as 5%,25%; or none.")
    requests: int | None = rule_option(None, "Minimum number of requests of the candidate in each step.")
    seconds: float | None = rule_option(None, "Minimum seconds of each step.")
    max_error_rate: str | None = rule_option(None, "Maximum share of failed requests, such as 1%.")
    min_agreement: str | None = rule_option(None, "Minimum share of equal answers, such as 90%; or none.")
    max_latency_ratio: str | None = rule_option(
        None, "Maximum ratio of the candidate's latency to the stable one's; or none."
    )
    timeout_s: float | None = rule_option(None, "Seconds to a first response.", "--timeout")
    by_hand: bool = rule_option(False, "Wait for `promote` after the last step.", "--by-hand")
    reason: str = option("", "abort: the reason, for the log.")
    wait: bool = option(False, "Wait for the end; exit code 1 unless the candidate was promoted.", "--wait")
    as_json: bool = option(False, "Print everything as JSON.", "--json")
    api_key: ApiKeyOption = ""
    root_certificates: RootCertificatesOption = None

    def rules(self) -> dict[str, Any]:
        """The given rules, in the server's format. The server checks them."""
        given: dict[str, Any] = {
            "shadow": _value(self.shadow),
            "canary": None if self.canary is None else _shares(self.canary),
            "requests": self.requests,
            "seconds": self.seconds,
            "max_error_rate": _value(self.max_error_rate),
            "timeout_s": self.timeout_s,
            "promote": "by_hand" if self.by_hand else None,
        }
        judged = {"min_agreement": self.min_agreement, "max_latency_ratio": self.max_latency_ratio}
        rules = {name: value for name, value in given.items() if value is not None}
        return rules | {name: _value(text) for name, text in judged.items() if text is not None}

    def asked(self) -> dict[str, Any]:
        """The body of the request to start a rollout."""
        name, _, path = self.adapter.partition("=")
        adapter = {"name": name, "path": str(Path(path).absolute())} if self.adapter else None
        given = {
            "version": self.version, "parameters": _parameters(self.engine), "adapter": adapter, "rules": self.rules(),
        }  # fmt: skip
        return {name: value for name, value in given.items() if value}

    def check(self) -> None:
        """Raises `InvalidArgument` for options that do not fit together."""
        candidate = {"--engine": self.engine, "--version": self.version, "--adapter": self.adapter}
        given = [name for name, value in {**candidate, "a rule": self.rules()}.items() if value]
        name, _, path = self.adapter.partition("=")
        problems = [
            (bool(self.adapter) and not (name and path), f"--adapter {self.adapter}: expected NAME=DIR"),
            (
                bool(self.adapter) and given[0] != "--adapter",
                "--adapter: not with --engine or --version",
            ),
            (not self.model and self.action is not Action.STATUS, "it needs the name of a model, such as tensorrt_llm"),
            (bool(given) and self.action is not Action.START, f"{', '.join(given)}: only for rollout start"),
            (bool(self.reason) and self.action is not Action.ABORT, "--reason: only for rollout abort"),
            (self.wait and not self.model, "--wait: requires the name of a model"),
        ]
        headline = f"llmserve rollout {self.action}"
        raise_problems(InvalidArgument, headline, [text for is_wrong, text in problems if is_wrong])


def rollout(options: RolloutOptions) -> None:
    """Roll out a new version of a model, or of an adapter, in a running server: start, watch, promote or abort it."""
    from llmserve.cli.rollout_client import RolloutClient

    options.check()
    client = RolloutClient(options.url, api_key=options.api_key, root_certificates=options.root_certificates)
    model = options.model
    if options.action is Action.STATUS and not model:
        _print(client.all(), as_json=options.as_json)
        return
    if options.action is Action.START:
        report = client.start(model, options.asked())
    elif options.action is Action.PROMOTE:
        report = client.promote(model)
    elif options.action is Action.ABORT:
        report = client.abort(model, options.reason)
    else:
        report = client.status(model)
    if not options.wait:
        _print([report], as_json=options.as_json)
    elif not _is_promoted(client, report, as_json=options.as_json):
        raise typer.Exit(1)


command = DataclassCommand(RolloutOptions, rollout)


def _shares(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def _value(text: str | None) -> str | float | None:
    if text is None or text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return text


def _parameters(engine: Path | None) -> dict[str, str]:
    path = "" if engine is None else str(engine.absolute())
    return {ENGINE_PATH: path, TOKENIZER_PATH: path} if path else {}


def _is_promoted(client: RolloutClient, report: dict[str, Any], *, as_json: bool) -> bool:
    """Wait for the end of a rollout. Its decisions are printed as they come, except with JSON."""
    if not as_json:
        _print([report], as_json=False)
    num_seen = len(report["decisions"])
    while report["state"] not in ENDS:
        time.sleep(POLL_S)
        report = client.status(report["model"])
        for decision in report["decisions"][num_seen:] if not as_json else ():
            typer.echo(_line(decision))
        num_seen = len(report["decisions"])
    if as_json:
        _print([report], as_json=True)
    return bool(report["state"] == "promoted")


def _print(reports: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(reports, indent=2))
        return
    if not reports:
        typer.echo("no rollout since the server was started")
    for report in reports:
        typer.echo("\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> list[str]:
    agreement, candidate, stable = report["agreement"], report["candidate"], report["stable"]
    canary, shadow = candidate["canary"], candidate["shadow"]
    ratios = ", ".join(
        f"{name.replace('_', ' ')} {value:.2f}" for name, value in report["latency_ratio"].items() if value
    )
    more = ", ".join(f"{key} = {value}" for key, value in report["candidate_parameters"].items())
    adapter = report["adapter"]
    who = {role: f"version {report[f'{role}_version'] or '?'}" for role in ("stable", "candidate")}
    if adapter is not None:
        who = {role: f"digest {adapter[f'{role}_digest'][:12] or '?'}" for role in who}
        more = adapter["path"]
    rows = {
        "state": f"{report['state']}, step {report['step']} of {report['num_steps']}, "
                 f"canary {report['canary_share']:.0%}, shadow {report['shadow_share']:.0%}",
        "waits for": report["waits_for"],
        "stable": f"{who['stable']}: {_counts(stable['requests'])}",
        "candidate": f"{who['candidate']}: {_counts(canary)}, {canary['rescued']} rescued; "
                     f"copies: {_counts(shadow)}",
        "made with": more,
        "agreement": f"{agreement['equal']} of {agreement['compared']} answers are equal, "
                     f"{agreement['not_comparable']} need not be",
        "latency": ratios and f"{ratios} times the stable version's",
    }  # fmt: skip
    return [
        f"rollout of {report['model']}" + (f", adapter {adapter['name']}" if adapter is not None else ""),
        *(f"  {name:<10} {text}" for name, text in rows.items() if text),
        *(f"  {_line(decision)}" for decision in report["decisions"]),
    ]


def _counts(counts: dict[str, int]) -> str:
    return f"{counts['succeeded']} answered, {counts['failed']} failed"


def _line(decision: dict[str, str]) -> str:
    return f"{decision['at']} {decision['what']}: {decision['reason']}"
