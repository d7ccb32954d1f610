"""Stores files and batches in a directory, where they outlive the server's process.

    files/file-ID.json        a file's description and owner: written last, by a rename
    files/file-ID.jsonl       its lines
    batches/batch_ID.json     a batch in the form for clients, and its owner
    batches/batch_ID.jsonl    its results so far, in order: appended line by line, so a process that dies leaves at
                              most one incomplete line, which is ignored

One process at a time uses a directory. All methods wait for the disk, so the event loop calls them in threads.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmserve.errors import InvalidArgument, NotFound, Unavailable
from llmserve.owned_directory import PRIVATE, try_lock

FILES, BATCHES = "files", "batches"
ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
MAX_FILES = 1000  # of one owner
MAX_OWNED_BYTES = 1 << 30  # of one owner's files
RUNNING = ("in_progress", "finalizing", "cancelling")
OWNER = "owner"  # a member that clients do not see
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Store:
    folder: Path
    lock: int  # a file descriptor

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Raises `InvalidArgument` if another process uses the folder, or if it cannot be created."""
        try:
            for name in (FILES, BATCHES):
                (folder / name).mkdir(PRIVATE, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{folder} cannot hold batches: {error}") from error
        lock = try_lock(folder / FILES)  # the folder itself may be a volume that belongs to another user
        if lock is None:
            raise InvalidArgument(f"{folder} is used by another server or belongs to another user; give another folder")
        return cls(folder, lock)

    def close(self) -> None:
        """Release the folder for other processes."""
        os.close(self.lock)

    def add_file(self, owner: str, name: str, purpose: str, content: bytes) -> Document:
        """Raises `InvalidArgument` if the owner has too much, and `Unavailable` if the disk is full."""
        own = [found for found in self._documents(FILES) if found[OWNER] == owner]
        if len(own) >= MAX_FILES or sum(found["bytes"] for found in own) + len(content) > MAX_OWNED_BYTES:
            raise InvalidArgument(
                f"files: an API key may have {MAX_FILES} files with {MAX_OWNED_BYTES} bytes in total; delete some"
            )
        file_id = new_id("file-")
        with _removed_unless_written(self.content(file_id)):
            self.content(file_id).write_bytes(content)
            return self.describe_file(file_id, owner, name, purpose)

    def describe_file(self, file_id: str, owner: str, name: str, purpose: str) -> Document:
        """Describe a file whose content is written. This makes it visible to clients."""
        document = {
            "id": file_id,
            "object": "file",
            "bytes": self.content(file_id).stat().st_size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self.write(FILES, {**document, OWNER: owner})
        return document

    def delete_file(self, file_id: str) -> None:
        for path in (self._path(FILES, file_id), self.content(file_id)):
            path.unlink(missing_ok=True)

    def content(self, file_id: str) -> Path:
        return self.folder / FILES / f"{file_id}.jsonl"

    def results(self, batch_id: str) -> Path:
        return self.folder / BATCHES / f"{batch_id}.jsonl"

    def find(self, kind: str, owner: str, document_id: str) -> Document:
        """Raises `NotFound` for a document that does not exist or belongs to another owner."""
        found = self._read(self._path(kind, document_id)) if ID.fullmatch(document_id) else None
        if found is None or found[OWNER] != owner:
            raise NotFound(f"this API key has no '{document_id[:50]}' among its {kind}")
        return found

    def owned(self, kind: str, owner: str) -> list[Document]:
        """The documents of an owner, the newest first."""
        found = [document for document in self._documents(kind) if document[OWNER] == owner]
        return sorted(found, key=lambda document: (document["created_at"], document["id"]), reverse=True)

    def unfinished(self) -> list[Document]:
        """The batches that have not ended, the oldest first."""
        found = [document for document in self._documents(BATCHES) if document["status"] in RUNNING]
        return sorted(found, key=lambda document: (document["created_at"], document["id"]))

    def write(self, kind: str, document: Document) -> None:
        """Raises `Unavailable` if the disk is full."""
        path = self._path(kind, document["id"])
        temporary = path.with_suffix(".new")
        with _removed_unless_written(temporary):
            temporary.write_text(json.dumps(document))
            os.replace(temporary, path)

    def _path(self, kind: str, document_id: str) -> Path:
        return self.folder / kind / f"{document_id}.json"

    def _documents(self, kind: str) -> Iterator[Document]:
        for path in (self.folder / kind).glob("*.json"):
            if (found := self._read(path)) is not None:
                yield found

    @staticmethod
    def _read(path: Path) -> Document | None:
        try:
            found: Document = json.loads(path.read_text())
        except (OSError, ValueError):  # deleted in the meantime
            return None
        return found


@contextmanager
def _removed_unless_written(path: Path) -> Iterator[None]:
    """If writing fails, removes the file, which no client could delete."""
    try:
        yield
    except (OSError, Unavailable) as error:
        with suppress(OSError):
            path.unlink()
        if isinstance(error, Unavailable):
            raise
        raise Unavailable(f"--batch-dir cannot be written: {error.strerror}; try again later") from error


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
