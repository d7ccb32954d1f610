"""The rules of a rollout: JSON in the parameter `rollout` of a model's config, or given by a client.

A real Triton ignores unknown parameters, so a config with rules is valid there, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeGuard

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmserve.errors import InvalidArgument, raise_problems

PARAMETER = "rollout"  # of config.pbtxt
AUTOMATIC, BY_HAND = "automatic", "by_hand"

Given: TypeAlias = Mapping[str, Any]  # rules by name, as in JSON


@dataclass(frozen=True, slots=True)
class RolloutRules:
    """The rules of one rollout. Shares are from 0 to 1, of the requests that name no version."""

    shadow: float = 0.1  # of the stable version's requests, copied to the candidate
    canary: tuple[float, ...] = (0.05, 0.25)  # answered by the candidate, step by step
    requests: int = 100  # minimum that the candidate gets in each step
    seconds: float = 60.0  # minimum duration of each step
    max_error_rate: float = 0.01
    min_agreement: float | None = 0.9  # of compared answers, the share that is equal; None: not checked
    max_latency_ratio: float | None = 2.0  # canary median divided by the stable version's; None: not checked
    timeout_s: float = 30.0  # for a first response; longer if the stable version's take longer
    promote: str = AUTOMATIC

    @property
    def steps(self) -> tuple[float, ...]:
        """The candidate's share in each step. With a shadow share, the first step's is 0."""
        return ((0.0,) if self.shadow else ()) + self.canary


def rules_of(config: ModelConfig) -> RolloutRules | None:
    """The rules in a config; None if it has none. Raises `InvalidArgument`."""
    given = given_rules(config)
    return None if given is None else make_rules(given)


def given_rules(config: ModelConfig) -> Given | None:
    if PARAMETER not in config.parameters:
        return None
    try:
        given = json.loads(config.parameters[PARAMETER].string_value or "{}")
    except ValueError as error:
        raise InvalidArgument(f"parameter {PARAMETER} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgument(f'parameter {PARAMETER} must be a JSON object, such as {{"canary": ["5%", "25%"]}}')
    return given


def make_rules(given: Given) -> RolloutRules:
    """Check and create rules. Raises `InvalidArgument` that lists all problems."""
    reader = _RulesReader(given)
    defaults = RolloutRules()
    shadow, canary = reader.share("shadow", defaults.shadow), reader.shares("canary", defaults.canary)
    rules = RolloutRules(
        shadow=shadow,
        canary=canary,
        requests=int(reader.number("requests", defaults.requests, least=1, whole=True)),
        seconds=reader.number("seconds", defaults.seconds),
        max_error_rate=reader.share("max_error_rate", defaults.max_error_rate),
        min_agreement=reader.optional_share("min_agreement", defaults.min_agreement if shadow else None),
        max_latency_ratio=reader.optional_ratio("max_latency_ratio", defaults.max_latency_ratio if canary else None),
        timeout_s=reader.number("timeout_s", defaults.timeout_s, least=0.1),
        promote=reader.choice("promote", (AUTOMATIC, BY_HAND)),
    )
    reader.check_names()
    if not reader.problems:
        reader.problems += _contradictions(rules)
    raise_problems(InvalidArgument, "the rules of a rollout", reader.problems)
    return rules


def rollout_problems(config: ModelConfig) -> list[str]:
    """Problems of the rules in a config, if it has any."""
    try:
        rules_of(config)
    except InvalidArgument as error:
        return [str(error)]
    return []


def described(rules: RolloutRules) -> dict[str, Any]:
    """The rules as JSON values."""
    return {field.name: getattr(rules, field.name) for field in fields(rules)} | {"canary": list(rules.canary)}


def _contradictions(rules: RolloutRules) -> list[str]:
    found = []
    if not rules.steps:
        found.append("nothing would reach the candidate: give a shadow share, or canary shares")
    if rules.min_agreement is not None and not rules.shadow:
        found.append("min_agreement needs a shadow share: only copied requests have two answers to compare")
    if rules.max_latency_ratio is not None and not rules.canary:
        found.append("max_latency_ratio needs canary shares: copies do not show how fast a candidate is")
    if any(later <= earlier for earlier, later in zip(rules.canary, rules.canary[1:], strict=False)):
        found.append("canary shares must rise from step to step")
    if 0.0 in rules.canary:
        found.append("a canary share must be above 0")
    return found


class _RulesReader:
    """Reads rules by name and collects problems."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self.problems: list[str] = []

    def check_names(self) -> None:
        known = [field.name for field in fields(RolloutRules)]
        self.problems += [
            f"unknown rule '{name}'; known: {', '.join(known)}" for name in self._given if name not in known
        ]

    def share(self, name: str, default: float) -> float:
        return self._share(name, self._given[name]) if name in self._given else default

    def shares(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        if name not in self._given:
            return default
        values = self._given[name]
        if not isinstance(values, list | tuple):
            self.problems.append(f'{name} must be a list of shares, such as ["5%", "25%"], got {values!r}')
            return default
        return tuple(self._share(name, value) for value in values)

    def optional_share(self, name: str, default: float | None) -> float | None:
        if name not in self._given:
            return default
        return None if self._given[name] is None else self._share(name, self._given[name])

    def optional_ratio(self, name: str, default: float | None) -> float | None:
        if name in self._given and self._given[name] is None:
            return None
        return default if name not in self._given else self.number(name, 1.0, least=1.0)

    def number(self, name: str, default: float, *, least: float = 0.0, whole: bool = False) -> float:
        value = self._given.get(name, default)
        if not _is_number(value) or value < least or (whole and value != int(value)):
            kind = "an integer" if whole else "a number"
            self.problems.append(f"{name} must be {kind} of at least {least:g}, got {value!r}")
            return default
        return float(value)

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        value = self._given.get(name, known[0])
        if value not in known:
            self.problems.append(f"{name} must be {' or '.join(known)}, got {value!r}")
            return known[0]
        return str(value)

    def _share(self, name: str, value: object) -> float:
        try:
            return parse_share(value)
        except ValueError:
            self.problems.append(f'{name} must be a share such as 0.05 or "5%", from 0 to 1, got {value!r}')
            return 0.0


def parse_share(value: object) -> float:
    """Parse a share such as 0.05 or "5%". Raises `ValueError`."""
    if isinstance(value, str):
        number, percent = value.strip().removesuffix("%"), value.strip().endswith("%")
        share = float(number) / 100 if percent else float(number)
    elif _is_number(value):
        share = float(value)
    else:
        raise ValueError(value)
    if not 0 <= share <= 1:
        raise ValueError(value)
    return share


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
