"""Everything durable, once: create, append, sync, publish, remove.

The only module of the spool that calls fsync, rename or unlink, and so the seam where tests inject faults: whatever changes
the disk is one of the functions named in STEPS, called through this module's namespace. It knows nothing of runs, journals
or records. (The one exception is pyarrow, which writes its own files into a folder that is not published yet.)

Why each step is there:
- a file's bytes survive a power cut after `sync_data` or `sync_file`; its *name* survives after `sync_folder`;
- `publish_…` makes a complete file or folder appear under its name in one step, or not at all: it is written beside the
  target under a dot name, synced, renamed without replacing, and then the folder is synced;
- an error of `close` is an error of the write on network file systems, so nothing here swallows it.
"""

import ctypes
import errno
import glob
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

STEPS = (
    "open_new",
    "write",
    "truncate",
    "allocate",
    "sync_data",
    "close",
    "sync_file",
    "sync_folder",
    "rename",
    "rename_new",
    "unlink",
    "make_one_folder",
    "remove_empty_folder",
)
"""Every change of the disk is one call of one of these."""

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_BLOCK_SIZE_BYTES = 1 << 20


def folder_mode() -> int:
    """0700, or 0750 where SPOOL_GROUP names a group that may read."""
    return 0o750 if os.environ.get("SPOOL_GROUP") else 0o700


def file_mode() -> int:
    return 0o640 if os.environ.get("SPOOL_GROUP") else 0o600


def _give_to_group(path: Path) -> None:
    group = os.environ.get("SPOOL_GROUP")
    if group:
        try:
            shutil.chown(path, group=group)
        except LookupError as error:
            raise OSError(
                errno.EINVAL, f"SPOOL_GROUP is {group!r}, and there is no such group here", str(path)
            ) from error
        os.chmod(path, folder_mode() if path.is_dir() else file_mode())  # the umask may have taken the group's bits


# --- steps


def open_new(path: Path) -> int:
    """Create `path`, which must not exist, for appending; returns its descriptor."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, file_mode())
    try:
        _give_to_group(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


# `write` is the hot path: the function itself, so that a call costs nothing extra and a test can still replace it here.
write = os.write


def truncate(descriptor: int, length: int) -> None:
    os.ftruncate(descriptor, length)


def allocate(descriptor: int, length: int) -> None:
    """Take `length` bytes of the disk for an empty file, so that giving them back makes as much room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.write(descriptor, bytes(length))


def sync_data(descriptor: int) -> None:
    """The bytes, and the length needed to read them, survive a power cut when this returns."""
    getattr(os, "fdatasync", os.fsync)(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def sync_file(path: Path) -> None:
    """As `sync_data`, for a file that another library has written and closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
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


def rename(source: Path, target: Path) -> None:
    """Rename; a file at `target` is replaced in the same step."""
    os.replace(source, target)


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


def unlink(path: Path) -> None:
    os.unlink(path)


def make_one_folder(path: Path) -> None:
    os.mkdir(path, folder_mode())
    _give_to_group(path)


def remove_empty_folder(path: Path) -> None:
    os.rmdir(path)


# --- what is made of them


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents. Durable when this returns, also where a killed process has made some of it."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    with suppress(OSError):  # a parent that may not be read, or is another file system: then no process of ours made it
        sync_folder(path.parent)  # whoever made `path` may have been killed before its name was durable
    for folder in reversed(missing):
        try:
            make_one_folder(folder)
        except FileExistsError:
            if not folder.is_dir():  # another process made it first: fine; a file in its place is not
                raise
        sync_folder(folder.parent)


def create_append(path: Path) -> int:
    """Create `path`, which must not exist, for appending, and return its descriptor. The name is durable."""
    descriptor = open_new(path)
    try:
        sync_folder(path.parent)
    except OSError:
        close(descriptor)
        raise
    return descriptor


def write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[write(descriptor, view) :]


def publish_file(target: Path, content: bytes) -> None:
    """Make `target` appear with `content`, once. Durable when this returns; FileExistsError if it is there already."""
    _publish(target, [content], lambda temporary: rename_new(temporary, target))


def replace_file(target: Path, content: bytes) -> None:
    """Set `target` to `content`: a reader sees the old bytes or the new ones. Durable when this returns."""
    _publish(target, [content], lambda temporary: rename(temporary, target))


def publish_content(source: Path, folder: Path) -> tuple[str, int]:
    """Copy a file to `folder/<sha256>`; returns (sha256, size in bytes). Durable when this returns.

    Idempotent. The hash is of the copy, so a source that changes meanwhile still gets an honest name.
    """
    make_folder(folder)
    digest = hashlib.sha256()
    size = 0

    def blocks(file: BinaryIO) -> Iterator[bytes]:
        nonlocal size
        while block := file.read(_BLOCK_SIZE_BYTES):
            digest.update(block)
            size += len(block)
            yield block

    def name(temporary: Path) -> None:
        with suppress(FileExistsError):
            rename_new(temporary, folder / digest.hexdigest())

    with source.open("rb") as file:
        _publish(folder / "copy", blocks(file), name)
    return digest.hexdigest(), size


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's bytes to `target`, which must not exist. Its bytes are durable when this returns, its name is not yet."""
    descriptor = open_new(target)
    try:
        with source.open("rb") as file:
            while block := file.read(_BLOCK_SIZE_BYTES):
                write_all(descriptor, block)
        sync_data(descriptor)
    finally:
        close(descriptor)


def _publish(target: Path, content: Iterable[bytes], name: Callable[[Path], None]) -> None:
    """Write a file beside `target`, sync it, and let `name` rename it; the half-made file goes whatever happens."""
    temporary = _beside(target)
    descriptor = open_new(temporary)
    try:
        try:
            for block in content:
                write_all(descriptor, block)
            sync_data(descriptor)
        finally:
            close(descriptor)
        name(temporary)
    finally:
        with suppress(FileNotFoundError):  # renamed, as it should be
            unlink(temporary)
    sync_folder(target.parent)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.urandom(4).hex()}")


def publish_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make folder `target` appear with the files that `fill(folder)` writes, all at once. Durable when this returns.

    While the folder is being filled each file carries the suffix `.part`, which `fill` must use: tools that glob
    `**/*.parquet` look into dot folders too, and must not see a half-made segment.
    """

    def fill_and_name(folder: Path) -> None:
        fill(folder)
        for path in sorted(folder.iterdir()):
            os.chmod(path, file_mode())  # pyarrow made it
            _give_to_group(path)
            sync_file(path)
            rename(path, path.with_suffix(""))

    publish_tree(target, fill_and_name)


def publish_tree(target: Path, fill: Callable[[Path], None]) -> None:
    """Make folder `target` appear with what `fill(folder)` puts into it: durable files, in folders that are synced below.

    Durable when this returns; FileExistsError if it is there already. Whatever happens, the half-made folder goes.
    """
    temporary = _beside(target)
    make_one_folder(temporary)
    try:
        fill(temporary)
        _sync_folders(temporary)
        rename_new(temporary, target)
    except BaseException:  # also KeyboardInterrupt: the half-made folder must not stay; what happened is raised on
        with suppress(OSError):
            _remove_tree(temporary)
        raise
    sync_folder(target.parent)


def _sync_folders(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            _sync_folders(path)
    sync_folder(folder)


def remove_unfinished(target: Path) -> None:
    """Remove what a killed `publish` of `target` left behind.

    Renamed first: a publish that is still at work then fails as a whole, and cannot put a half-removed folder in place.
    """
    name = glob.escape(target.name)
    for leftover in target.parent.glob(f".{name}.*"):
        doomed = leftover.with_name(f".doomed.{os.getpid()}{leftover.name}")
        with suppress(FileNotFoundError):  # published, or removed by another
            rename(leftover, doomed)
            remove(doomed)
    for doomed in target.parent.glob(f".doomed.*.{name}.*"):
        with suppress(FileNotFoundError):
            remove(doomed)


def remove(path: Path) -> None:
    """Remove a file, or a folder with what is in it. Durable when this returns.

    A folder goes file by file: one that readers know by its name is renamed to a dot name before.
    """
    if path.is_dir():
        _remove_tree(path)
    else:
        unlink(path)
    sync_folder(path.parent)


def _remove_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            unlink(path)
    remove_empty_folder(folder)


def sha256_file(path: Path, length: int | None = None) -> str:
    """Hex sha256 of the first `length` bytes of a file (all of it by default)."""
    digest = hashlib.sha256()
    remaining = path.stat().st_size if length is None else length
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(_BLOCK_SIZE_BYTES, remaining))):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()
