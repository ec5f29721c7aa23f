"""The files of one run at a destination: documents that rows are added to, and files put there whole.

The destination lends its own file store. What it lists and what it holds is asked once and then kept with what we put there,
until `forget`.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from spool import files
from sync import document


class FileStore(Protocol):
    """What MLflow's artifact repositories look like; paths are relative to the run."""

    def list_artifacts(self, path: str | None = None) -> Iterable[Any]: ...
    def download_artifacts(self, artifact_path: str, dst_path: str) -> str: ...
    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None: ...


class Shelf:
    def __init__(self, store: FileStore) -> None:
        self._store = store
        self.forget()

    def forget(self) -> None:
        """From here on the destination is asked again."""
        self._listed: dict[str, dict[str, int]] = {}
        self._held: dict[str, set[str]] = {}
        self._added: dict[str, set[str]] = {}

    def listing(self, folder: str) -> dict[str, int]:
        """path -> size of what is in a folder, -1 for folders."""
        if folder not in self._listed:
            infos = self._store.list_artifacts(None if folder == "." else folder)
            self._listed[folder] = {info.path: -1 if info.is_dir else int(info.file_size or 0) for info in infos}
        return self._listed[folder]

    def size(self, path: str) -> int | None:
        """Size of a file; None when there is none."""
        return self.listing(str(PurePosixPath(path).parent)).get(path)

    def read(self, path: str) -> bytes | None:
        if self.size(path) is None:
            return None
        with tempfile.TemporaryDirectory(prefix="spool-sync-") as folder:
            return Path(self._store.download_artifacts(path, folder)).read_bytes()

    def put(self, path: str, content: bytes | Path) -> None:
        """Put a file there, or replace it."""
        parent, filename = str(PurePosixPath(path).parent), PurePosixPath(path).name
        listing = self.listing(parent)
        with tempfile.TemporaryDirectory(prefix="spool-sync-") as folder:
            local = Path(folder, filename)
            if isinstance(content, bytes):
                local.write_bytes(content)
            else:
                local.symlink_to(content.resolve())
            self._store.log_artifact(str(local), None if parent == "." else parent)
            listing[path] = local.stat().st_size

    def add(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        """Put rows into their documents; rows that are there already change nothing.

        Where it fails in the middle, the next call with the same rows goes on there: a link that loses one request in ten would
        otherwise never see a hundred documents through.
        """
        for path, belonging in _by_path(table, rows).items():
            identities = {document.identity(table, row) for row in belonging}
            if not identities <= self._added.get(path, set()):
                self.put(path, document.add(self.read(path), table, belonging))
                self._added[path] = identities
        self._added = {}

    def ask(self, table: str, rows: Iterable[dict[str, Any]]) -> None:
        """Fetch the documents of these rows, for `holds` and `count`."""
        for path in dict.fromkeys(document.path_of(table, row) for row in rows):
            if path not in self._held:
                self._held[path] = document.identities(self.read(path) or b"", table)

    def holds(self, table: str, row: dict[str, Any]) -> bool:
        return document.identity(table, row) in self._held[document.path_of(table, row)]

    def count(self, table: str) -> int:
        """Rows in the documents asked for."""
        return sum(len(rows) for path, rows in self._held.items() if path.startswith(document.FOLDERS[table]))


def holds_content(path: Path, sha256: str) -> bool:
    """Whether a saved file is still what was saved."""
    return files.sha256_file(path) == sha256


def _by_path(table: str, rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    paths: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        paths[document.path_of(table, row)].append(row)
    return paths
