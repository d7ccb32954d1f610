"""The levels and format of log records. Clients can read and change them while the server runs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from logging.handlers import WatchedFileHandler
from typing import TypeAlias

from llmserve.errors import InvalidArgument, Unsupported
from llmserve.frontends.shared.json_logs import JsonFormatter

FORMATS: Mapping[str, Callable[[], logging.Formatter]] = {
    "default": lambda: logging.Formatter("%(levelname)s %(name)s: %(message)s"),
    "ISO8601": lambda: logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    ),
    "json": JsonFormatter,
}
FLAGS = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
MAX_UINT32 = 2**32 - 1
LogValue: TypeAlias = bool | int | str


class LogFile(WatchedFileHandler):
    """On a full disk, reports it once on standard error; records are lost, and the server continues. If the file was
    moved, a new one is opened."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")  # a path may have any bytes
        self._has_failed = False  # for the current record
        self._is_reported = False

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        try:
            super().emit(record)
        except OSError:  # the file cannot be reopened
            self.handleError(record)
        self._is_reported = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._has_failed = True
        if not self._is_reported:
            with suppress(OSError):  # standard error may be a file on the same disk
                print(f"error: log file {self.baseFilename} cannot be written: {error.strerror}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Verbose levels above 0 add debug records, and a record for each answered request."""

    log_file: str = ""  # the handlers' file, shown to clients; "": standard error
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def shows(self, level: int) -> bool:
        if level < logging.INFO:
            return self.log_verbose_level > 0
        if level < logging.WARNING:
            return self.log_info
        return self.log_warning if level < logging.ERROR else self.log_error


class LogControl(logging.Filter):
    """Owns the settings of a logger and of the handlers that print its records."""

    def __init__(
        self,
        settings: LogSettings | None = None,
        *,
        logger: logging.Logger | None = None,
        handlers: Sequence[logging.Handler] = (),
    ) -> None:
        """Without a logger, the settings are only stored: for a server inside another program."""
        super().__init__()
        self._settings = settings or LogSettings()
        self._logger = logger
        self._handlers = handlers
        for handler in handlers:
            handler.addFilter(self)
        self._apply()

    def filter(self, record: logging.LogRecord) -> bool:
        ours = self._logger is not None and (record.name + ".").startswith(self._logger.name + ".")
        return not ours or self._settings.shows(record.levelno)

    @property
    def shows_requests(self) -> bool:
        """Whether each answered request is logged."""
        return self._settings.log_verbose_level > 0

    def describe(self) -> dict[str, LogValue]:
        """The settings for clients."""
        return asdict(self._settings)

    def update(self, values: Mapping[str, LogValue]) -> None:
        """Change the named settings: all or none. Unknown names are ignored, as in Triton."""
        if "log_file" in values:
            raise Unsupported("log file location can not be updated through network protocol")
        known = {name: value for name, value in values.items() if name in LogSettings.__dataclass_fields__}
        chosen = known.get("log_format", "default")
        if chosen not in FORMATS:
            raise InvalidArgument(f"invalid argument for log_format, got: {chosen}; known: {', '.join(FORMATS)}")
        self._settings = replace(self._settings, **known)  # type: ignore[arg-type]  # types are checked by the front end
        self._apply()

    def _apply(self) -> None:
        if self._logger is None:
            return
        shown = (logging.DEBUG, *FLAGS.values())
        levels = [level for level in shown if self._settings.shows(level)]
        self._logger.setLevel(min(levels, default=logging.CRITICAL + 1))
        for handler in self._handlers:
            formatter = FORMATS[self._settings.log_format]()
            formatter.converter = time.gmtime
            handler.setFormatter(formatter)
