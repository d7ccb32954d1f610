"""A client for a server's rollouts, over HTTP."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llmserve.errors import InvalidArgument, NotFound, Unavailable

TIMEOUT_S = 600.0  # start returns when the candidate is loaded


class RolloutClient:
    """Reports have the format of `GET v2/repository/models/MODEL/rollout`. Raises `LlmserveError`."""

    def __init__(self, url: str, *, api_key: str = "", root_certificates: Path | None = None) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = None
        if root_certificates is not None:
            try:
                self._tls = ssl.create_default_context(cafile=str(root_certificates))
            except (OSError, ssl.SSLError) as error:
                raise InvalidArgument(f"--root-certificates {root_certificates} cannot be read: {error}") from error

    def all(self) -> list[dict[str, Any]]:
        reports: list[dict[str, Any]] = self._ask("/v2/repository/rollouts")
        return reports

    def status(self, model: str) -> dict[str, Any]:
        return self._of(model)

    def start(self, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        return self._of(model, "/start", asked)

    def promote(self, model: str) -> dict[str, Any]:
        return self._of(model, "/promote", {})

    def abort(self, model: str, reason: str) -> dict[str, Any]:
        return self._of(model, "/abort", {"reason": reason})

    def _of(self, model: str, verb: str = "", body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        report: dict[str, Any] = self._ask(f"/v2/repository/models/{quote(model, safe='')}/rollout{verb}", body)
        return report

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST with a body, GET without."""
        data = None if body is None else json.dumps(body).encode()
        try:
            asked = urllib.request.Request(self._url + path, data, self._headers)
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S, context=self._tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            problem = _problem(error)
            raise (NotFound if error.code == 404 else InvalidArgument)(problem) from None
        except ValueError as error:  # in the URL or in the answer
            raise InvalidArgument(f"--url {self._url}: {error}") from error
        except OSError as error:
            raise Unavailable(f"no server answers at {self._url}: {getattr(error, 'reason', error)}") from error


def _problem(error: urllib.error.HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text or f"the server returned {error.code} {error.reason}"
