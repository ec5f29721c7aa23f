"""Compacting: a run written anew into another spool, with the many segments and journals of each writer merged into few.

Never in place. The rows and their seqs stay what they are, so cursors stay valid; run.json, saved files and whatever else lies
in the run are copied byte for byte. A writer with any damage is copied as it is, file by file: nothing damaged is thrown
away. A run appears in the new spool by one rename, after all that was written has been read back and compared.

A merged segment has the number of the first journal it holds, and in its manifest, as evidence, length and sha256 of each:
    "merged": [{"number", "first_seq", "last_seq", "journal": {"length", "sha256"}}, …]
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spool import chain, files, format, layout, segment
from spool.catalog import RunFolder
from spool.chain import Part
from spool.errors import CompactError
from spool.reader import WriterReader
from spool.segment import Segment

SEGMENT_SIZE_BYTES = 256 << 20
"""Of Parquet, about: as many segments are merged as fit."""
_ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1 << 19, 64 << 20

Progress = Callable[[int], None]
"""Told how many bytes more of the source are done."""


@dataclass(frozen=True)
class Compacted:
    run: str
    size_before_bytes: int
    size_after_bytes: int
    copied_writers: list[str]
    """Those with damage, which are copied as they are."""
    was_there: bool = False


def check_target(root: Path, target: Path, runs: Iterable[RunFolder]) -> None:
    """Refuse to write into or around the spool itself, or among what is no copy of these runs. Raises CompactError."""
    here, there = root.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CompactError(f"{target}: a new spool folder is needed, outside {root}")
    if not target.exists():
        return
    if not target.is_dir():
        raise CompactError(f"{target}: a file, not a folder")
    ours = [run.id for run in runs]
    for name in sorted(path.name for path in target.iterdir()):
        is_leftover = any(name.startswith((f".{one}.", ".doomed.")) for one in ours)
        if name not in ours and not is_leftover:
            raise CompactError(f"{target}: not empty, it holds {name!r}; name a new folder")


def compact(run: RunFolder, target: Path, progress: Progress) -> Compacted:
    """Write a run that is over into the spool `target`. Durable, and read back, when this returns.

    Idempotent: a run that is there already is compared in place of being written. Raises CompactError.
    """
    files.make_folder(target)
    published = target / run.path.name
    files.remove_unfinished(published)
    copied: list[str] = []
    was_there = published.exists()
    if was_there:
        _check_same_run(run, published)
    else:
        files.publish_tree(published, partial(_fill_run, run, copied, progress))
    sizes = layout.size_bytes(run.path), layout.size_bytes(published)
    return Compacted(run.id, *sizes, copied, was_there)


def _fill_run(run: RunFolder, copied: list[str], progress: Progress, folder: Path) -> None:
    before = layout.fingerprint(run.path)
    writers = set(layout.writers(run.path))
    for path in _visible(run.path):
        if path not in writers:
            _copy(path, folder / path.name, progress)
            continue
        writer = WriterReader(path, run.info.get("run"))
        if _is_mergeable(writer):
            _merge_writer(writer, folder / path.name, progress)
        else:
            copied.append(path.name)
            _copy(path, folder / path.name, progress)
    if layout.fingerprint(run.path) != before:
        raise CompactError(
            f"{run.path}: changed while it was compacted; see that nothing writes there, and run it again"
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _copy(source: Path, target: Path, progress: Progress) -> None:
    """Byte for byte. Durable once the folders are synced, as `publish_tree` does."""
    if source.is_symlink() or not (source.is_dir() or source.is_file()):
        raise CompactError(f"{source}: neither a file nor a folder, so nothing that a spool holds; move it elsewhere")
    if source.is_dir():
        files.make_one_folder(target)
        for path in _visible(source):
            _copy(path, target / path.name, progress)
    else:
        files.copy_file(source, target)
        progress(source.stat().st_size)


def _is_mergeable(writer: WriterReader) -> bool:
    """Whether all is intact, and no journal goes on after its segment."""
    numbers = [chain.first_number(part) for part in writer.parts]
    return bool(numbers) and len(set(numbers)) == len(numbers) and not writer.damage()


def _merge_writer(writer: WriterReader, folder: Path, progress: Progress) -> None:
    files.make_one_folder(folder)
    for path in _visible(writer.path):
        if not format.JOURNAL_NAME.fullmatch(path.name) and not format.SEGMENT_NAME.fullmatch(path.name):
            _copy(path, folder / path.name, progress)
    groups = list(_groups(writer.parts))
    for group in groups:
        end = _end(writer, group[-1], is_last=group is groups[-1])
        target = folder / format.segment_name(chain.first_number(group[0]))
        [only, *others] = group
        if isinstance(only, Segment) and not others and end == only.manifest["end"]:
            _copy(only.folder, target, progress)
            continue
        files.publish_folder(target, partial(_fill_segment, writer, group, end))
        progress(sum(map(_size_bytes, group)))
    _check_equal_rows(writer, WriterReader(folder, writer.run_id))


def _groups(parts: list[Part]) -> Iterator[list[Part]]:
    """Neighbours that make one segment of about the size aimed at; a journal's size is more than that of its Parquet."""
    group: list[Part] = []
    for part in parts:
        if group and sum(map(_size_bytes, group)) + _size_bytes(part) > SEGMENT_SIZE_BYTES:
            yield group
            group = []
        group.append(part)
    yield group


def _size_bytes(part: Part) -> int:
    if isinstance(part, Segment):
        return sum(int(table["size_bytes"]) for table in part.manifest["tables"].values())
    return part.size


def _fill_segment(writer: WriterReader, group: list[Part], end: dict[str, Any] | None, folder: Path) -> None:
    first, last = group[0], group[-1]
    tables = {name: entry for name in sorted(format.TABLES) if (entry := _write_table(writer, group, name, folder))}
    manifest = {
        "format": format.FORMAT,
        "run": writer.run_id,
        "writer": writer.id,
        "attempt": writer.attempt,
        "number": chain.first_number(first),
        "first_seq": _evidence(first)[0]["first_seq"],
        "last_seq": last.last_seq,
        "journal": _evidence(last)[-1]["journal"],
        "merged": [one for part in group for one in _evidence(part)],
        "header": chain.header_of(first) or None,
        "tables": tables,
        "damaged": [],
        "pyarrow": pa.__version__,
        "last_ts": _last_ts(last),
        "end": end,
    }
    (folder / f"{format.MANIFEST_FILE}.part").write_bytes(format.checked_json(manifest))


def _write_table(writer: WriterReader, group: list[Part], name: str, folder: Path) -> dict[str, Any] | None:
    path = folder / f"{name}.parquet.part"
    entry: dict[str, Any] | None = None
    file: pq.ParquetWriter | None = None
    try:
        for rows in _row_groups(_rows(writer, group, name)):
            file = file or segment._parquet_writer(path, name)
            file.write_table(rows, row_group_size=rows.num_rows)
            entry = entry or {"rows": 0, "first_seq": rows["seq"][0].as_py()}
            entry["rows"] += rows.num_rows
            entry["last_seq"] = rows["seq"][-1].as_py()
    finally:
        if file is not None:
            file.close()
    if entry is not None:
        entry |= {"size_bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
    return entry


def _rows(writer: WriterReader, group: list[Part], name: str) -> Iterator[pa.Table]:
    """Rows of the group's records; a batch never reaches over the end of a part."""
    for batch in writer.batches(name, after_seq=_evidence(group[0])[0]["first_seq"] - 1):
        if batch["seq"][0].as_py() > group[-1].last_seq:
            return
        yield batch


def _row_groups(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Joined to tables that are large enough to compress well and small enough for memory to stay flat."""
    held: list[pa.Table] = []
    for batch in batches:
        held.append(batch)
        if sum(len(one) for one in held) >= _ROW_GROUP_ROWS or sum(one.nbytes for one in held) >= _ROW_GROUP_BYTES:
            yield pa.concat_tables(held).unify_dictionaries().combine_chunks()
            held = []
    if held:
        yield pa.concat_tables(held).unify_dictionaries().combine_chunks()


def _evidence(part: Part) -> list[dict[str, Any]]:
    """Which journals a part holds: the entries of `merged`."""
    if isinstance(part, Segment):
        own = {name: part.manifest[name] for name in ("number", "first_seq", "last_seq", "journal")}
        return list(part.manifest.get("merged") or [own])
    first = chain.header_of(part).get("first_seq", part.seqs[0] if part.seqs else 1)
    journal = {"length": part.valid_length, "sha256": part.sha256}
    return [{"number": chain.first_number(part), "first_seq": first, "last_seq": part.last_seq, "journal": journal}]


def _last_ts(part: Part) -> int | None:
    if isinstance(part, Segment):
        ts: int | None = part.manifest["last_ts"]
        return ts
    record = part.last_record()
    return record["ts"] if record else None


def _end(writer: WriterReader, part: Part, *, is_last: bool) -> dict[str, Any] | None:
    """As recorded; where the writer never finished, its death if that can be proven, so that the new spool knows."""
    end = part.manifest["end"] if isinstance(part, Segment) else format.end_of(part.last_record())
    if end is None and is_last and writer.is_alive() is False:
        return {"status": "died"}
    recorded: dict[str, Any] | None = end
    return recorded


# --- reading back


def _check_same_run(run: RunFolder, published: Path) -> None:
    there = RunFolder(published)
    if [path.name for path in _visible(run.path)] != [path.name for path in _visible(published)]:
        raise CompactError(f"{published}: there already, and not a copy of {run.path}; name a new folder")
    if run.info != there.info:
        raise CompactError(f"{published / format.RUN_FILE}: not that of {run.path}; name a new folder")
    for path in layout.writers(run.path):
        ids = run.info.get("run")
        _check_equal_rows(WriterReader(path, ids), WriterReader(published / path.name, ids))


def _check_equal_rows(before: WriterReader, after: WriterReader) -> None:
    """Raises CompactError unless every table reads as before."""
    if after.damage() != [] and before.damage() == []:
        raise CompactError(f"{after.path}: damaged while it was written ({after.damage()[0]}); check the disk")
    for name in format.TABLES:
        if before.last_seq != after.last_seq or not _equal(before.batches(name), after.batches(name)):
            raise CompactError(f"{after.path}: its {name} do not read as those of {before.path}; check the disk")


def _equal(before: Iterator[pa.Table], after: Iterator[pa.Table]) -> bool:
    """Whether two streams of rows are the same to the last bit, however they are cut into batches."""
    held: pa.Table | None = None
    for rows in before:
        at = 0
        while at < rows.num_rows:
            if held is None or not held.num_rows:
                held = next(after, None)
                if held is None:
                    return False
            count = min(rows.num_rows - at, held.num_rows)
            if _plain(rows.slice(at, count)) != _plain(held.slice(0, count)):
                return False
            held, at = held.slice(count), at + count
    return (held is None or not held.num_rows) and next(after, None) is None


def _plain(rows: pa.Table) -> list[pa.ChunkedArray]:
    """Columns to compare: words for dictionaries, bits for doubles, since NaN is not equal to itself."""
    return [_plain_column(column) for column in rows.columns]


def _plain_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        return column.cast(pa.string())
    if pa.types.is_float64(column.type):
        return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], type=pa.int64())
    return column
