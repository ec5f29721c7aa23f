"""A disk that may lose its power: what the spool does to a folder is recorded, and every state that may be left is made.

The model is what POSIX promises and nothing kinder:
- bytes are there once their file was synced; until then each write may be there, absent, cut short, or zeros of its length;
- a name is there once its folder was synced; until then each create, rename, unlink, mkdir and rmdir may have happened or
  not, whatever came after it; a rename is one step;
- what another library writes without a step of ours is there, unsynced, from the moment `sync_file` or `rename` names it.
"""

import hashlib
import itertools
import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spool import files, format

Tree = dict[str, bytes | None]
"""Path relative to the root → content; None for a folder."""


@dataclass(frozen=True)
class Link:
    """A new name: create or mkdir."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Rename:
    folder: int
    name: str
    node: int
    """Under no other name any more; what was under this name is replaced."""


@dataclass(frozen=True)
class Unlink:
    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Write:
    node: int
    offset: int
    content: bytes


@dataclass(frozen=True)
class Truncate:
    node: int
    length: int


@dataclass(frozen=True)
class Sync:
    """Of a file's bytes, or of a folder's names."""

    node: int


Operation = Link | Rename | Unlink | Write | Truncate | Sync
Choice = tuple[int, int] | None
"""What is left of an unsynced operation: None is nothing; of a write the first bytes, then so many zeros in place of the rest."""

_ROOT = 0


def _node_to_sync(operation: Operation) -> int:
    return operation.node if isinstance(operation, (Write, Truncate, Sync)) else operation.folder


def choices(operation: Operation, chance: random.Random | None = None) -> list[Choice]:
    """All there, nothing, cut in the middle, all zeros; with `chance`, cut or zero-filled from any byte on."""
    if not isinstance(operation, Write):
        return [(0, 0), None]
    length = len(operation.content)
    if not any(operation.content):
        return [(length, 0), None]
    half = max(1, length // 2)
    found: list[Choice] = [(length, 0), None, (half, 0), (0, length)]
    if chance is not None:
        cut = chance.randrange(1, length) if length > 1 else 1
        found += [(cut, 0), (cut, length - cut), (length - 1, 0), (length - 1, 1)]
    return found


class Killed(BaseException):
    """The process is gone: no step of its clean-up happens either."""


@dataclass
class Disk:
    """The record of one folder. Use `with disk.recording():`; what was there before is taken as durable."""

    root: Path
    history: list[Operation] = field(default_factory=list)
    die_after: int | None = None
    """So many steps of `files` are still done; from the next on every one raises Killed, until this is None again."""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {_ROOT: {}}
        self._last_node = _ROOT
        self._open: dict[int, int] = {}
        for path in sorted(self.root.rglob("*")):
            self._known(path)
        self.history += [Sync(node) for node in range(self._last_node + 1)]
        self.start = len(self.history)

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in files.STEPS:
                patch.setattr(files, name, self._recorded(name, getattr(files, name)))
            yield

    def _recorded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        record = getattr(self, f"_{name}")

        def step(*arguments: Any) -> Any:
            with self._lock:
                if self.die_after is not None:
                    if self.die_after == 0:
                        raise Killed
                    self.die_after -= 1
                done: Callable[[Any], None] = record(*arguments)
                result = real(*arguments)
                done(result)
                return result

        return step

    # --- one method for each step: what it does to the disk, once it has succeeded

    def _open_new(self, path: Path) -> Callable[[Any], None]:
        def done(descriptor: int) -> None:
            if self._is_inside(path):
                self._open[descriptor] = self._link(path, is_folder=False)

        return done

    def _write(self, descriptor: int, content: bytes | memoryview) -> Callable[[Any], None]:
        offset = os.fstat(descriptor).st_size  # all our files are opened for appending

        def done(length: int) -> None:
            if descriptor in self._open and length:
                self.history.append(Write(self._open[descriptor], offset, bytes(content[:length])))

        return done

    def _truncate(self, descriptor: int, length: int) -> Callable[[Any], None]:
        return self._to_open(descriptor, lambda node: Truncate(node, length))

    def _allocate(self, descriptor: int, length: int) -> Callable[[Any], None]:
        return self._to_open(descriptor, lambda node: Write(node, 0, bytes(length)))

    def _sync_data(self, descriptor: int) -> Callable[[Any], None]:
        return self._to_open(descriptor, Sync)

    def _to_open(self, descriptor: int, make: Callable[[int], Operation]) -> Callable[[Any], None]:
        def done(_: object) -> None:
            if descriptor in self._open:
                self.history.append(make(self._open[descriptor]))

        return done

    def _close(self, descriptor: int) -> Callable[[Any], None]:
        return lambda _: self._open.pop(descriptor, None)

    def _sync_file(self, path: Path) -> Callable[[Any], None]:
        return self._to_known(path, Sync)

    def _sync_folder(self, path: Path) -> Callable[[Any], None]:
        return self._to_known(path, Sync)

    def _to_known(self, path: Path, make: Callable[[int], Operation]) -> Callable[[Any], None]:
        node = self._known(path)

        def done(_: object) -> None:
            if node is not None:
                self.history.append(make(node))

        return done

    def _rename(self, source: Path, target: Path) -> Callable[[Any], None]:
        node = self._known(source)
        assert source.parent == target.parent, "a rename across folders needs two folders to be synced: not modelled"

        def done(_: object) -> None:
            if node is not None:
                folder = self._node(target.parent)
                del self._names[folder][source.name]
                self._names[folder][target.name] = node
                self.history.append(Rename(folder, target.name, node))

        return done

    _rename_new = _rename

    def _unlink(self, path: Path) -> Callable[[Any], None]:
        node = self._known(path)

        def done(_: object) -> None:
            if node is not None:
                folder = self._node(path.parent)
                del self._names[folder][path.name]
                self.history.append(Unlink(folder, path.name, node))

        return done

    _remove_empty_folder = _unlink

    def _make_one_folder(self, path: Path) -> Callable[[Any], None]:
        def done(_: object) -> None:
            if self._is_inside(path):
                self._link(path, is_folder=True)

        return done

    # --- names and nodes, as they are now

    def _is_inside(self, path: Path) -> bool:
        return path.is_relative_to(self.root)

    def _node(self, path: Path) -> int:
        node = _ROOT
        for name in path.relative_to(self.root).parts:
            node = self._names[node][name]
        return node

    def _link(self, path: Path, *, is_folder: bool) -> int:
        folder = self._node(path.parent)
        self._last_node += 1
        self._names[folder][path.name] = self._last_node
        if is_folder:
            self._names[self._last_node] = {}
        self.history.append(Link(folder, path.name, self._last_node))
        return self._last_node

    def _known(self, path: Path) -> int | None:
        """The node of what is there; what no step of ours has made is written now, unsynced. None outside, or where nothing is."""
        if not self._is_inside(path) or not path.exists():
            return None
        if path != self.root and path.name not in self._names[self._node(path.parent)]:
            node = self._link(path, is_folder=path.is_dir())
            if path.is_file() and (content := path.read_bytes()):
                self.history.append(Write(node, 0, content))
        return self._node(path)

    # --- what a power cut may leave

    def is_folder(self, node: int) -> bool:
        return node in self._names

    def unsynced(self, length: int) -> list[int]:
        """Places, in the first `length` operations of the history, of those that may still be lost."""
        synced: set[int] = set()
        places = []
        for at in reversed(range(length)):
            operation = self.history[at]
            if isinstance(operation, Sync):
                synced.add(operation.node)
            elif _node_to_sync(operation) not in synced:
                places.append(at)
        return places[::-1]

    def states(self, length: int, limit: int, chance: random.Random) -> Iterator[Tree]:
        """Every tree that a power cut after `length` operations may leave, each once; a sample where there are over `limit`.

        The sample holds what everything, nothing, all but one, and one alone leave; the rest is drawn.
        """
        places = self.unsynced(length)
        found: set[bytes] = set()
        for chosen in self._combinations(places, limit, chance):
            tree = self.tree(length, dict(zip(places, chosen, strict=True)))
            print_ = fingerprint(tree)
            if print_ not in found:
                found.add(print_)
                yield tree

    def _combinations(self, places: list[int], limit: int, chance: random.Random) -> Iterator[tuple[Choice, ...]]:
        operations = [self.history[at] for at in places]
        options = [choices(one) for one in operations]
        if math.prod(map(len, options)) <= limit:
            yield from itertools.product(*options)
            return
        everything = tuple(one[0] for one in options)
        nothing: tuple[Choice, ...] = (None,) * len(options)
        yield everything
        yield nothing
        ones = [(at, choice) for at, some in enumerate(options) for choice in some]
        chance.shuffle(ones)
        for at, choice in ones[: limit // 4]:
            yield (*everything[:at], choice, *everything[at + 1 :])
            yield (*nothing[:at], choice, *nothing[at + 1 :])
        for _ in range(limit // 2):
            yield tuple(chance.choice(choices(one, chance)) for one in operations)

    def tree(self, length: int, left: dict[int, Choice]) -> Tree:
        """What the first `length` operations make, when of those in `left` only so much is left."""
        names: dict[int, dict[str, int]] = {}
        contents: dict[int, bytearray] = {}
        for at, operation in enumerate(self.history[:length]):
            whole = (len(operation.content), 0) if isinstance(operation, Write) else (0, 0)
            choice = left.get(at, whole)
            if choice is not None:
                _apply(operation, choice, names, contents)
        tree: Tree = {}
        self._collect(_ROOT, "", names, contents, tree)
        return tree

    def _collect(
        self,
        folder: int,
        prefix: str,
        names: dict[int, dict[str, int]],
        contents: dict[int, bytearray],
        tree: Tree,
    ) -> None:
        for name, node in names.get(folder, {}).items():
            if self.is_folder(node):
                tree[prefix + name] = None
                self._collect(node, f"{prefix}{name}/", names, contents, tree)
            else:
                tree[prefix + name] = bytes(contents.get(node, b""))


def _apply(
    operation: Operation, choice: tuple[int, int], names: dict[int, dict[str, int]], contents: dict[int, bytearray]
) -> None:
    match operation:
        case Link(folder, name, node):
            names.setdefault(folder, {})[name] = node
        case Rename(folder, name, node):
            others = {key: one for key, one in names.get(folder, {}).items() if one != node}
            names[folder] = {**others, name: node}
        case Unlink(folder, name, node):
            if names.get(folder, {}).get(name) == node:
                del names[folder][name]
        case Truncate(node, length):
            content = contents.setdefault(node, bytearray())
            content[length:] = bytes(max(0, length - len(content)))
        case Write(node, offset, written):
            content = contents.setdefault(node, bytearray())
            content += bytes(max(0, offset - len(content)))
            piece = written[: choice[0]] + bytes(choice[1])
            content[offset : offset + len(piece)] = piece
        case Sync():
            pass


def fingerprint(tree: Tree) -> bytes:
    """Equal for trees that differ in unfinished work only: nobody reads what a dot name holds."""
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        at = [part.startswith(".") and part != format.STATE_FOLDER for part in name.split("/")]
        if any(at):
            digest.update(b"" if any(at[:-1]) else name.encode())
            continue
        kind = b"folder" if content is None else b"%d" % len(content)
        digest.update(b"%b\0%b\0%b" % (name.encode(), kind, content or b""))
    return digest.digest()


def put(tree: Tree, root: Path) -> None:
    """Make a tree in an empty folder."""
    for name, content in sorted(tree.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
