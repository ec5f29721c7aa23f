"""Everything durable, once: create, append, sync, publish, remove.

The only module of the spool that calls fsync, rename or unlink, and so the seam where tests inject faults: every step
goes through a function of this module. It knows nothing of runs, journals or records.

Why each step is there:
- a file's bytes survive a power cut after `fsync(file)`; its *name* survives after `fsync(folder)`;
- `publish` makes a complete file or folder appear under its name in one step, or not at all: it is written beside the
  target under a dot name, synced, renamed without replacing, and then the folder is synced;
- an error of `close` is an error of the write on network file systems, so nothing here swallows it.
"""

import ctypes
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


def folder_mode() -> int:
    """0700, or 0750 where SPOOL_GROUP names a group that may read."""
    return 0o750 if os.environ.get("SPOOL_GROUP") else 0o700


def file_mode() -> int:
    return 0o640 if os.environ.get("SPOOL_GROUP") else 0o600


def _give_to_group(path: Path) -> None:
    group = os.environ.get("SPOOL_GROUP")
    if group:
        shutil.chown(path, group=group)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Durable when this returns."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            os.mkdir(folder, folder_mode())
        except FileExistsError:
            if not folder.is_dir():  # another process made it first: fine; a file in its place is not
                raise
        else:
            _give_to_group(folder)
        sync_folder(folder.parent)


def create_append(path: Path) -> int:
    """Create `path`, which must not exist, for appending, and return its descriptor. The name is durable."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, file_mode())
    try:
        _give_to_group(path)
        sync_folder(path.parent)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# `write` is the hot path: the function itself, so that a call costs nothing extra and a test can still replace it here.
write = os.write


def truncate(descriptor: int, length: int) -> None:
    os.ftruncate(descriptor, length)


def sync_data(descriptor: int) -> None:
    """The bytes, and the length needed to read them, survive a power cut when this returns."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Names created, renamed or removed in `path` survive a power cut when this returns."""
    if os.name == "nt":  # a folder cannot be opened there, and NTFS journals names by itself
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_new(source: Path, target: Path) -> None:
    """Rename without replacing; `FileExistsError` when `target` exists.

    A folder is never replaced by rename(2) unless it is empty, and ours never are. For a file, renameat2 where the
    kernel and file system have it, otherwise link + unlink, which is atomic on the target's side as well.
    """
    if source.is_dir():
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "already published", str(target)) from error
            raise
        return
    libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    if libc is not None and hasattr(libc, "renameat2"):
        arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE)
        if libc.renameat2(*arguments) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(target))
    os.link(source, target)
    os.unlink(source)


def publish_file(target: Path, content: bytes) -> None:
    """Make `target` appear with `content`, once. Durable when this returns; FileExistsError if it is there already."""

    def write_content(path: Path) -> None:
        path.write_bytes(content)

    _publish(target, write_content, rename_new)


def publish_content(source: Path, folder: Path) -> tuple[str, int]:
    """Copy a file to `folder/<sha256>`; returns (sha256, size in bytes). Durable when this returns.

    Idempotent. The hash is of the copy, so a source that changes meanwhile still gets an honest name.
    """
    make_folder(folder)
    digest = hashlib.sha256()
    size = 0
    descriptor, name = tempfile.mkstemp(prefix=".copy.", dir=folder)
    os.close(descriptor)
    temporary = Path(name)
    try:
        with source.open("rb") as reading, temporary.open("wb") as writing:
            while block := reading.read(1 << 20):
                digest.update(block)
                writing.write(block)
                size += len(block)
        os.chmod(temporary, file_mode())
        _give_to_group(temporary)
        _sync_file(temporary)
        with suppress(FileExistsError):
            rename_new(temporary, folder / digest.hexdigest())
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(folder)
    return digest.hexdigest(), size


def replace_file(target: Path, content: bytes) -> None:
    """Set `target` to `content`: a reader sees the old bytes or the new ones. Durable when this returns."""

    def write_content(path: Path) -> None:
        path.write_bytes(content)

    _publish(target, write_content, os.replace)


def _publish(target: Path, fill: Callable[[Path], None], rename: Callable[[Path, Path], None]) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        fill(temporary)
        os.chmod(temporary, file_mode())
        _give_to_group(temporary)
        _sync_file(temporary)
        rename(temporary, target)
    except BaseException:  # also KeyboardInterrupt: the half-made file must not stay; what happened is raised on
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def publish_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make folder `target` appear with the files that `fill(folder)` writes, all at once. Durable when this returns.

    While the folder is being filled each file carries the suffix `.part`, which `fill` must use: tools that glob
    `**/*.parquet` look into dot folders too, and must not see a half-made segment.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(temporary)
        os.chmod(temporary, folder_mode())
        _give_to_group(temporary)
        for path in sorted(temporary.iterdir()):
            os.chmod(path, file_mode())
            _give_to_group(path)
            _sync_file(path)
            path.rename(path.with_suffix(""))
        sync_folder(temporary)
        rename_new(temporary, target)
    except BaseException:  # as in _publish
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)


def remove_unfinished(target: Path) -> None:
    """Remove what a killed `publish` of `target` left behind.

    Renamed first: a publish that is still at work then fails as a whole, and cannot put a half-removed folder in place.
    """
    for leftover in target.parent.glob(f".{target.name}.*"):
        doomed = leftover.with_name(f".doomed.{os.getpid()}{leftover.name}")
        with suppress(FileNotFoundError):  # published, or removed by another
            os.rename(leftover, doomed)
            remove(doomed)
    for doomed in target.parent.glob(f".doomed.*.{target.name}.*"):
        with suppress(FileNotFoundError):
            remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it. Durable when this returns."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    sync_folder(path.parent)


def sha256_file(path: Path, length: int | None = None) -> str:
    """Hex sha256 of the first `length` bytes of a file (all of it by default)."""
    digest = hashlib.sha256()
    remaining = path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(1 << 20, remaining))):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()
