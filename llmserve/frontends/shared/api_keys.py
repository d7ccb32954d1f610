"""API keys with the names of their owners, from a file that is read again when it changes.

The server keeps digests. A key's digest is compared with that of every owner, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from llmserve.core import EVERYBODY, Tenant
from llmserve.errors import InvalidArgument, raise_problems
from llmserve.frontends.shared.restrictions import Api
from llmserve.strict_yaml import read_yaml
from llmserve.tenant_counters import MAX_ANSWERS, TOKENS_PER_MINUTE, TenantCounters

HEADERS = frozenset(("authorization", "x-api-key"))
SCHEME = "bearer "  # before the key; a key without it is also accepted
SHORTEST_KEY = 16  # characters, so that keys cannot be guessed
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
LIMITS = (MAX_ANSWERS, TOKENS_PER_MINUTE)
FIELDS = ("name", "key", "sha256", "admin", "weight", "adapters", *LIMITS)
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100
MOST = 10**12  # largest limit
CHECK_INTERVAL_S = 1.0  # how often the file is checked

WITHOUT_KEY = frozenset((Api.HEALTH,))  # probes have no key
FOR_ADMINS = frozenset((Api.MODEL_REPOSITORY, Api.SHARED_MEMORY, Api.TRACE, Api.LOGGING))

HeaderOf: TypeAlias = Callable[[str], str | bytes | None]
Version: TypeAlias = tuple[int, int, int]  # of a file: inode, size in bytes, modification time in ns

logger = logging.getLogger(__name__)


class Lack(Enum):
    """The reason for refusing a call."""

    NO_KEY = "this server requires an API key: send the header 'Authorization: Bearer KEY'"
    WRONG_KEY = "this API key is not valid"
    NO_ADMIN = "this call requires an API key with admin rights"


@dataclass(frozen=True, slots=True)
class KeyOwner:
    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key
    is_admin: bool = False
    tenant: Tenant = EVERYBODY


class ApiKeys:
    """The API keys of a file, and `fixed` owners that do not depend on it."""

    def __init__(self, file: Path | None, fixed: Sequence[KeyOwner] = ()) -> None:
        """Raises `InvalidArgument` if the file cannot be read or is invalid."""
        self._file = file
        self._fixed = tuple(fixed)
        self._owners: tuple[KeyOwner, ...] = ()
        self._former: dict[bytes, KeyOwner] = {}  # by digest, from earlier versions of the file
        self._counters: dict[str, TenantCounters] = {}
        self._next_check = 0.0
        self._version = None if file is None else _version(file)
        self._admit(() if file is None else read_owners(file))

    def lack(self, api: Api, header: HeaderOf) -> Lack | None:
        """The reason for refusing a request with these headers in a group of calls; names are in lower case."""
        if api in WITHOUT_KEY:
            return None
        given = _given_key(header)
        if given is None:
            return Lack.NO_KEY
        owner = self.owner(given)
        if owner is None:
            return Lack.WRONG_KEY
        return Lack.NO_ADMIN if api in FOR_ADMINS and not owner.is_admin else None

    def tenant(self, header: HeaderOf) -> Tenant:
        """The tenant of a request that is not refused."""
        owner = self.owner_of(header)
        return EVERYBODY if owner is None else owner.tenant

    def owner_of(self, header: HeaderOf) -> KeyOwner | None:
        """The owner of the key in these headers, including keys that were withdrawn after the request arrived."""
        given = _given_key(header)
        return None if given is None else self.owner(given) or self._former.get(hashlib.sha256(given).digest())

    def owner(self, key: bytes) -> KeyOwner | None:
        self._reread()
        digest = hashlib.sha256(key).digest()
        found = [owner for owner in self._owners if hmac.compare_digest(owner.digest, digest)]
        return found[0] if found else None

    def tenant_of(self, name: str) -> Tenant:
        """The tenant of a key by its name. Raises `InvalidArgument` if the key was withdrawn."""
        self._reread()
        for owner in self._owners:
            if owner.name == name:
                return owner.tenant
        raise InvalidArgument(f"the API key '{name}' has been withdrawn")

    def counters(self) -> Mapping[str, TenantCounters]:
        """The counters of current owners, by name."""
        self._reread()
        return self._counters

    def _admit(self, owners: Sequence[KeyOwner]) -> None:
        """Replace all owners by these and the fixed ones. Known names keep their counters. Without any owner, raises
        `InvalidArgument` and changes nothing."""
        owners = (*self._fixed, *owners)
        if not owners:
            raise InvalidArgument(f"{self._file} has no key, so no client could call this server")
        self._counters = {owner.name: self._counters.get(owner.name) or TenantCounters() for owner in owners}
        self._former |= {owner.digest: owner for owner in self._owners}
        self._owners = tuple(
            [replace(each, tenant=replace(each.tenant, counters=self._counters[each.name])) for each in owners]
        )

    def _reread(self) -> None:
        """Read the file again if it changed. An invalid or missing file changes nothing, and is logged once."""
        now = time.monotonic()
        if self._file is None or now < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._admit(read_owners(self._file))
            logger.info("%s was reloaded: %d API keys", self._file, len(self._owners))
        except InvalidArgument as error:
            logger.error("the API keys are unchanged: %s", error)


def read_owners(file: Path) -> tuple[KeyOwner, ...]:
    """Raises one `InvalidArgument` with all problems, without any key."""
    try:
        document = read_yaml(file.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"the API keys cannot be read: {error}") from error
    except ValueError:  # a name may look like an invalid date
        problem = f"{file} is not valid YAML, or has a duplicate key; put names and keys in quotes"
        raise InvalidArgument(problem) from None  # the original message would quote part of the file
    entries = document.get("keys") if isinstance(document, Mapping) and set(document) == {"keys"} else None
    if not isinstance(entries, list):
        raise InvalidArgument(f"{file} must be a mapping with one entry, `keys`, which is a list")
    problems: list[str] = []
    owners = [owner for number, entry in enumerate(entries, 1) if (owner := _owner(entry, number, problems))]
    for what, values in (("name", [owner.name for owner in owners]), ("key", [owner.digest for owner in owners])):
        repeated = [value for value, count in Counter(values).items() if count > 1]
        names = sorted({owner.name for owner in owners if (owner.name if what == "name" else owner.digest) in repeated})
        problems += [f"duplicate {what}: {', '.join(names)}"] if names else []
    raise_problems(InvalidArgument, f"the API keys in {file} are not valid", problems)
    return tuple(owners)


def owner_of_key(name: str, key: str, *, is_admin: bool, source: str) -> KeyOwner:
    """Raises `InvalidArgument`, which names the source, for an invalid key."""
    problems = _key_problems(key)
    raise_problems(InvalidArgument, source, problems)
    return KeyOwner(name, hashlib.sha256(key.encode()).digest(), is_admin, Tenant(name))


def _owner(entry: Any, number: int, problems: list[str]) -> KeyOwner | None:
    """The owner in an entry of the file; None if it is invalid. Its problems are added to `problems`."""
    if not isinstance(entry, Mapping):
        problems.append(f"entry {number} is not a mapping of {', '.join(FIELDS)}")
        return None
    name: Any = entry.get("name")
    key, digest, is_admin, weight = entry.get("key"), entry.get("sha256"), entry.get("admin"), entry.get("weight", 1)
    place = f"entry {number}" if not isinstance(name, str) else f"entry {number} ({name})"
    found = [f"unknown field {field!r}" for field in entry if field not in FIELDS]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        found.append("name must be up to 64 letters, digits, dots, dashes and underscores")
    if (key is None) == (digest is None):
        found.append("give either key or sha256")
    elif key is not None:
        found += _key_problems(key)
    elif not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        found.append("sha256 must be the SHA-256 of the key, 64 hexadecimal digits in lower case")
    if not isinstance(is_admin, bool | None):
        found.append("admin must be true or false")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        found.append(f"weight must be a number from {LEAST_WEIGHT} to {MOST_WEIGHT}")
    adapters = entry.get("adapters")
    if adapters is not None and not (isinstance(adapters, list) and all(isinstance(each, str) for each in adapters)):
        found.append("adapters must be a list of the adapters' names")
    limits = {field: entry.get(field, 0) for field in LIMITS}
    found += [
        f"{field} must be an integer, 0 for no limit"
        for field, value in limits.items()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST
    ]
    problems += [f"{place}: {problem}" for problem in found]
    if found:
        return None
    allowed = None if adapters is None else tuple(adapters)
    stored = bytes.fromhex(str(digest)) if key is None else hashlib.sha256(key.encode()).digest()
    return KeyOwner(name, stored, bool(is_admin), Tenant(name, float(weight), **limits, adapters=allowed))


def _key_problems(key: Any) -> list[str]:
    if isinstance(key, str) and len(key) >= SHORTEST_KEY and key.isascii() and key.isprintable() and " " not in key:
        return []
    return [f"a key must be at least {SHORTEST_KEY} printable ASCII characters without spaces, in quotes"]


def _given_key(header: HeaderOf) -> bytes | None:
    given = header("authorization")
    given = header("x-api-key") if given is None else given
    if given is None:
        return None
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    if text[: len(SCHEME)].lower() == SCHEME:
        text = text[len(SCHEME) :]
    return text.strip().encode("latin-1", "replace")


def _version(file: Path) -> Version | None:
    """Changes whenever the file does; None if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
