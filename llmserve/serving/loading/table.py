"""The served models and the status of all others: look-up for requests, rows for the repository index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from llmserve.errors import InvalidArgument, NotFound, nearest
from llmserve.serving.model import ServedModel

LOADING, READY, UNLOADING, UNAVAILABLE = "LOADING", "READY", "UNLOADING", "UNAVAILABLE"
UNLOADED = "unloaded"  # the reason if a version was made unavailable on request


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One row of the repository index. States are Triton's; "" for a model that was never requested."""

    name: str
    version: str
    state: str
    reason: str = ""


HIGHEST = -1


def version_number(text: str) -> int:
    """A version as written by a client; -1 for "", the highest one."""
    if not text:
        return HIGHEST
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise InvalidArgument(
        f"failed to get model version from specified version string '{text}' (details: stol), "
        "version should be an integral value > 0"
    )


class ModelTable:
    """A served version is READY, even while it is reloaded; all other versions have a row in `_rows`."""

    def __init__(self) -> None:
        self._served: dict[str, dict[int, ServedModel]] = {}
        self._rows: dict[str, dict[str, ModelStatus]] = {}  # model -> version, or "" for the whole model -> row
        self._failed_reloads: dict[str, str] = {}  # model -> why the state in the repository is not served

    def __iter__(self) -> Iterator[ServedModel]:
        for name in sorted(self._served):
            for _, model in sorted(self._served[name].items()):
                yield model

    def serve(self, name: str, models: Sequence[ServedModel]) -> list[ServedModel]:
        """Replace the served versions of `name`; returns those served before."""
        before = self._served.pop(name, {})
        if models:
            self._served[name] = {int(model.version): model for model in models}
        self._failed_reloads.pop(name, None)
        served = self.versions(name)
        rows = self._rows.get(name, {}).values()
        self._rows[name] = {row.version: row for row in rows if _is_wanted_so(row) and row.version not in served}
        return list(before.values())

    def set_unloading(self, name: str, version: str) -> None:
        """Mark a version as unloading, unless it is served again or has another status."""
        rows = self._rows.setdefault(name, {})
        if version not in self.versions(name) and (version not in rows or _is_wanted_so(rows[version])):
            rows[version] = ModelStatus(name, version, UNLOADING)

    def set_loading(self, name: str, versions: Sequence[str]) -> None:
        if name not in self._served:
            self._rows[name] = {version: ModelStatus(name, version, LOADING) for version in versions}

    def set_failed(self, name: str, reasons: Mapping[str, str]) -> None:
        """`reasons` by version. Served versions stay served."""
        if name in self._served:
            self._failed_reloads[name] = "the last reload failed: " + "; ".join(reasons.values())
        else:
            rows = (ModelStatus(name, version, UNAVAILABLE, reason) for version, reason in reasons.items())
            self._rows[name] = {row.version: row for row in rows}

    def set_unloaded(self, name: str, versions: Sequence[str], *, only_unloading: bool = False) -> None:
        """`only_unloading`: only versions that are unloading; another load may have started meanwhile."""
        rows = self._rows.setdefault(name, {})
        for version in versions:
            is_unloading = version in rows and rows[version].state == UNLOADING
            if is_unloading == only_unloading:
                rows[version] = ModelStatus(name, version, UNAVAILABLE, UNLOADED)

    def forget(self, name: str) -> None:
        """Forget a model that was removed from the repositories."""
        self._rows.pop(name, None)

    def clear(self) -> None:
        self._served.clear()
        self._rows.clear()
        self._failed_reloads.clear()

    def find(self, name: str, version: str = "") -> ServedModel:
        """Raises `NotFound`, or `InvalidArgument` for an invalid version."""
        number = version_number(version)
        versions = self._served.get(name)
        if not versions:
            if self._rows.get(name):
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise NotFound(f"Request for unknown model: '{name}' is not found{nearest(name, self._served)}")
        model = versions.get(max(versions) if number == HIGHEST else number)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        return model

    def versions(self, name: str) -> list[str]:
        return [str(number) for number in sorted(self._served.get(name, ()))]

    def is_served(self, name: str) -> bool:
        return name in self._served

    def is_unloaded(self, name: str) -> bool:
        """Whether a model is not served because it was unloaded on request."""
        rows = self._rows.get(name, {}).values()
        return name not in self._served and bool(rows) and all(map(_is_wanted_so, rows))

    def failure(self, name: str) -> str:
        """Why no version of a model can be used; "" if it did not fail."""
        rows = self._rows.get(name, {}).values()
        return "; ".join(row.reason for row in rows if row.state == UNAVAILABLE and row.reason != UNLOADED)

    def all_loaded(self) -> bool:
        """Whether all requested versions can be used; unloaded versions do not count."""
        return all(row.state == READY or _is_wanted_so(row) for row in self.statuses())

    def statuses(self) -> list[ModelStatus]:
        rows = {(name, version): row for name, by_version in self._rows.items() for version, row in by_version.items()}
        for model in self:
            row = ModelStatus(model.name, model.version, READY, self._failed_reloads.get(model.name, ""))
            if not model.healthy():
                row = replace(row, state=UNAVAILABLE, reason="an instance has stopped working")
            rows[model.name, model.version] = row
        return [row for _, row in sorted(rows.items(), key=lambda item: (item[0][0], version_number(item[0][1])))]


def _is_wanted_so(row: ModelStatus) -> bool:
    return row.state == UNLOADING or (row.state == UNAVAILABLE and row.reason == UNLOADED)
