"""Append-only files: JSON lines, each sealed, chained to the one before, and signed if there is a key.

    {"content": {...}, "previous": SEAL, "seal": SEAL, "key": ID, "signature": BASE64}

A seal is the SHA-256 of the content and of the previous seal. So an edited, dropped or moved line is detected, unless
all later lines were sealed again. To detect that as well, a line can be signed: Ed25519 over its seal, with a key in a
PEM file as written by `openssl genpkey -algorithm ed25519`. `key` is the beginning of the public key's SHA-256.

A full disk or a crash can truncate the last line. That line is ignored, and the next one replaces it.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmserve.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_CHARS = 16  # length of a key's id, the beginning of its digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    content: Mapping[str, Any]
    seal: str
    key: str = ""  # the key that signed it; empty: not signed
    signature: str = ""


class Signer:
    """A private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.id = _key_id(key.public_key())

    @classmethod
    def load(cls, path: Path) -> Signer:
        """Reads a PEM file without a password. Raises `InvalidArgument` if it is not an Ed25519 key."""
        require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return cls(_load(path, lambda data: load_pem_private_key(data, None), Ed25519PrivateKey, "private"))

    def sign(self, seal: str) -> str:
        return base64.b64encode(self._key.sign(seal.encode())).decode()


class Verifier:
    """Public keys, any of which may have signed."""

    def __init__(self, keys: Sequence[Ed25519PublicKey]) -> None:
        self._keys = {_key_id(key): key for key in keys}

    @classmethod
    def load(cls, *paths: Path) -> Verifier:
        """Reads PEM files, one key each (`openssl pkey -in KEY -pubout`)."""
        require_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        return cls([_load(path, load_pem_public_key, Ed25519PublicKey, "public") for path in paths])

    def problem(self, line: Line) -> str:
        """Returns why the signature of a line is not valid, or an empty string."""
        if not line.signature:
            return "it is not signed"
        key = self._keys.get(line.key)
        if key is None:
            return f"it is signed with the key {line.key}, not with {' or '.join(self._keys)}"
        from cryptography.exceptions import InvalidSignature

        try:
            key.verify(base64.b64decode(line.signature, validate=True), line.seal.encode())
        except (InvalidSignature, binascii.Error):
            return f"its signature is not the key {line.key}'s"
        return ""


def require_cryptography() -> None:
    """Raises `Unsupported` if the library for signatures is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise Unsupported("signing needs the cryptography package: pip install 'llmserve[sign]'") from error


def read(path: Path) -> list[Line]:
    """Returns all lines, the oldest first; none if there is no file. `InvalidArgument` names the first changed line."""
    try:
        text, torn = _split(path.read_text(encoding="utf-8"))
        if torn:
            logger.warning("the last line of %s was cut off, by a full disk or a crash: it is ignored", path)
        return _parse(path, text)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}") from error


def append(path: Path, content: Mapping[str, Any], signer: Signer | None = None) -> Line:
    """Appends a line, unless an earlier one was changed. Concurrent processes wait for each other."""
    try:
        with path.open("ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text, _ = _split(file.readall().decode())
            lines = _parse(path, text)
            previous = lines[-1].seal if lines else ""
            seal = _seal(content, previous)
            line = Line(content, seal, signer.id if signer else "", signer.sign(seal) if signer else "")
            file.truncate(len(text.encode()))
            try:
                _write(file, ("" if not text or text.endswith("\n") else "\n") + _text(line, previous))
            except OSError:
                file.truncate(len(text.encode()))
                raise
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be added to: {error}") from error
    return line


def _split(text: str) -> tuple[str, str]:
    """Returns the complete lines, and the beginning of a truncated last one."""
    whole, end, last = text.rpartition("\n")
    try:
        json.loads(last or "{}")
    except (ValueError, RecursionError):
        return whole + end, last
    return text, ""


def _write(file: FileIO, text: str) -> None:
    data = text.encode()
    while data:  # a disk that becomes full accepts part of the data, and fails at the next write
        data = data[file.write(data) :]


def _parse(path: Path, text: str) -> list[Line]:
    lines: list[Line] = []
    previous = ""
    for number, raw in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(raw)
            line = Line(found["content"], found["seal"], found.get("key", ""), found.get("signature", ""))
            intact = found["previous"] == previous and line.seal == _seal(line.content, previous)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            intact = False
        if not intact:
            raise InvalidArgument(
                f"line {number} of {path} was changed, or one before it was dropped: the file proves nothing; "
                "restore it, or remove it and create its records again"
            )
        lines.append(line)
        previous = line.seal
    return lines


def _text(line: Line, previous: str) -> str:
    signed = {"key": line.key, "signature": line.signature} if line.signature else {}
    content = {"content": line.content, "previous": previous, "seal": line.seal, **signed}
    return json.dumps(content, allow_nan=False) + "\n"


def _seal(content: Mapping[str, Any], previous: str) -> str:
    return hashlib.sha256((previous + json.dumps(content, sort_keys=True, allow_nan=False)).encode()).hexdigest()


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:KEY_CHARS]


def _load(path: Path, parse: Any, kind: Any, half: str) -> Any:
    try:
        key = parse(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"the key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"{path} is not the {half} half of a key in PEM, without a password: {error}") from error
    if not isinstance(key, kind):
        raise InvalidArgument(
            f"{path} is not an Ed25519 key; make one with: openssl genpkey -algorithm ed25519 -out {path}"
        )
    return key
