"""The segment: a sealed, immutable folder of Parquet files with its manifest.

One journal becomes one segment of the same number. "Deterministic" means equal rows: Parquet bytes differ between
pyarrow versions, so the sha256 per file in the manifest is for integrity only.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spool import files, format, layout, table
from spool.errors import SealError
from spool.journal import Damage, Scan

_DELTA = ("seq", "ts", "step", "ordinal", "start", "end")
_DICTIONARY = {
    name: [column for column, kind in format.COMMON + columns if kind == "dictionary"]
    for name, columns in format.TABLES.items()
}
# A span's start row and end row hold the same inputs: a dictionary stores them once.
_DICTIONARY["spans"] += ["trace_id", "span_id", "parent_id", "inputs"]
_DICTIONARY["metrics"] += ["exact"]
_DICTIONARY_LIMIT_BYTES = 16 << 20


def write(journal: Scan, identity: table.Identity, *, writer_died: bool = False) -> Path:
    """Publish the segment of a scanned journal and return its folder. Durable, and read back, when this returns.

    Raises FileExistsError when the segment is there already, SealError when what was written does not read back equal.
    """
    number = int(journal.path.stem)
    target = journal.path.parent / format.segment_name(number)

    def fill(folder: Path) -> None:
        counts = _write_tables(folder, journal, identity)
        _check_read_back(folder, counts)
        manifest = _manifest(folder, journal, identity, number, counts)
        last = journal.last_record()
        manifest["last_ts"] = last["ts"] if last else None
        manifest["end"] = format.end_of(last) or ({"status": "died"} if writer_died else None)
        (folder / f"{format.MANIFEST_FILE}.part").write_bytes(format.checked_json(manifest))

    files.publish_folder(target, fill)
    return target


def _write_tables(folder: Path, journal: Scan, identity: table.Identity) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for name, batch in table.batches(journal.records(), identity, format.TABLES):
            if name not in writers:
                writers[name] = stack.enter_context(_parquet_writer(folder / f"{name}.parquet.part", name))
            writers[name].write_batch(batch)
            seqs = batch.column("seq")
            count = counts.setdefault(name, {"rows": 0, "first_seq": seqs[0].as_py(), "last_seq": 0})
            count["rows"] += batch.num_rows
            count["last_seq"] = seqs[-1].as_py()
    return counts


def _parquet_writer(path: Path, name: str) -> pq.ParquetWriter:
    schema = table.schema(name)
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=_DICTIONARY[name],
        dictionary_pagesize_limit=_DICTIONARY_LIMIT_BYTES,
        column_encoding={column: "DELTA_BINARY_PACKED" for column in _DELTA if column in schema.names},
    )


def _check_read_back(folder: Path, counts: dict[str, dict[str, int]]) -> None:
    for name, count in counts.items():
        path = folder / f"{name}.parquet.part"
        with pq.ParquetFile(path) as file:
            rows = sum(batch.num_rows for batch in file.iter_batches())
        if rows != count["rows"]:
            raise SealError(f"{path}: wrote {count['rows']} rows, read back {rows}; the journal stays; check the disk")


def _manifest(
    folder: Path, journal: Scan, identity: table.Identity, number: int, counts: dict[str, dict[str, int]]
) -> dict[str, Any]:
    tables = {}
    for name, count in sorted(counts.items()):
        path = folder / f"{name}.parquet.part"
        tables[name] = {**count, "size_bytes": path.stat().st_size, "sha256": files.sha256_file(path)}
    header = journal.header or {}
    return {
        "format": format.FORMAT,
        "run": identity.run_id,
        "writer": identity.writer_id,
        "attempt": identity.attempt,
        "number": number,
        "first_seq": header.get("first_seq", journal.seqs[0] if journal.seqs else 1),
        "last_seq": journal.last_seq,
        "journal": {"length": journal.valid_length, "sha256": journal.sha256},
        "header": journal.header,
        "tables": tables,
        "damaged": [{key: value for key, value in asdict(one).items() if key != "path"} for one in journal.damage],
        "pyarrow": pa.__version__,
    }


def _first(seqs: pa.Array, reached: Callable[[int], bool]) -> int:
    """Index of the first seq for which `reached` is true, by bisection: seqs are in order."""
    return bisect_left(range(len(seqs)), True, key=lambda at: reached(seqs[at].as_py()))


class Segment:
    """A published segment, read-only. The Parquet files are opened when asked for, the manifest at once."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError or OSError when the manifest is missing or damaged; NewerFormatError for a later format."""
        self.folder = folder
        self._intact: dict[str, bool] = {}
        self.manifest = layout.manifest(folder)

    @property
    def first_number(self) -> int:
        """Of the journals it holds."""
        return int(self.manifest["number"])

    @property
    def last_number(self) -> int:
        """Of the journals it holds: several once `compact` has merged their segments."""
        merged = self.manifest.get("merged")
        return int(merged[-1]["number"]) if merged else self.first_number

    @property
    def first_seq(self) -> int:
        return int(self.manifest["first_seq"])

    @property
    def last_seq(self) -> int:
        return int(self.manifest["last_seq"])

    @property
    def journal_length(self) -> int:
        return int(self.manifest["journal"]["length"])

    def batches(self, name: str, after_seq: int, max_rows: int) -> Iterator[pa.Table]:
        """Rows with seq > after_seq in seq order, about `max_rows` at a time, never a part of a record.

        Only for a table that `is_intact`: Parquet itself would hand out some damaged values in silence.
        """
        entry = self.manifest["tables"].get(name)
        if entry is None or entry["last_seq"] <= after_seq:
            return
        held: list[pa.RecordBatch] = []  # the last record so far: its rows may go on in the next batch
        with pq.ParquetFile(self.folder / f"{name}.parquet") as file:
            for batch in file.iter_batches(batch_size=max_rows):
                seqs = batch.column("seq")
                if held and held[-1].column("seq")[-1] != seqs[0]:
                    yield pa.Table.from_batches(held)
                    held = []
                start = _first(seqs, lambda seq: seq > after_seq)
                last = seqs[-1].as_py()
                end = _first(seqs, partial(le, last))
                if end > start:
                    yield pa.Table.from_batches([*held, batch.slice(start, end - start)])
                    held = []
                if max(start, end) < len(seqs):
                    held.append(batch.slice(max(start, end)))
        if held:
            yield pa.Table.from_batches(held)

    def is_intact(self, name: str) -> bool:
        """Whether a table's file is what the manifest says; hashed once, when first asked."""
        if name not in self._intact:
            entry, path = self.manifest["tables"].get(name), self.folder / f"{name}.parquet"
            self._intact[name] = entry is None or (path.is_file() and files.sha256_file(path) == entry["sha256"])
        return self._intact[name]

    @property
    def recorded_damage(self) -> list[Damage]:
        """What the journal had lost when it was sealed."""
        journal = self.folder.parent / format.journal_name(self.manifest["number"])
        return [Damage(path=str(journal), **one) for one in self.manifest["damaged"]]

    @property
    def manifest_path(self) -> Path:
        return self.folder / format.MANIFEST_FILE

    def damage(self) -> list[Damage]:
        """Files that are not what the manifest says, or not there."""
        found = []
        for name, entry in self.manifest["tables"].items():
            path = self.folder / f"{name}.parquet"
            if not self.is_intact(name):
                seqs = (entry["first_seq"], entry["last_seq"])
                if path.is_file():
                    reason = "sha256 is not the manifest's"
                    found.append(Damage(str(path), 0, entry["size_bytes"], reason, *seqs))
                else:
                    place = str(path.relative_to(self.folder.parent.parent.parent))
                    found.append(Damage(str(path), 0, entry["size_bytes"], "a file of this segment", *seqs, place))
        return found
