"""The reader: a spool's runs and their tables, over segments plus live journals. Writes nothing, never raises for damage.

Order is (writer, seq), never the clock. Damage is listed by `damage()`; everything undamaged is delivered.
"""

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spool import catalog, chain, files, format, layout, loss, table
from spool.catalog import RunFolder
from spool.chain import Part
from spool.errors import UnknownRunError
from spool.journal import Damage, Scan, scan
from spool.loss import Loss
from spool.segment import Segment
from spool.status import is_alive

MAX_ROWS = 1 << 16


class Spool:
    """A folder of runs."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises NotASpoolError when there is no run below the folder."""
        self.path = Path(path)
        layout.check_spool(self.path)

    def runs(self) -> list["RunReader"]:
        """All runs, oldest first. Raises NewerFormatError when a later release wrote one."""
        return [RunReader(path) for path in layout.runs(self.path)]

    def select(self, name: str) -> list["RunReader"]:
        """The runs that a name means: a run id, a prefix of one, a glob, or `project/experiment` (globs too).

        Raises UnknownRunError when there is none.
        """
        return catalog.select(self.path, self.runs(), name)

    def run(self, name: str) -> "RunReader":
        """The one run that a name means. Raises UnknownRunError, listing the candidates, when there are several."""
        found = self.select(name)
        if len(found) > 1:
            names = ", ".join(run.id for run in found[:10])
            raise UnknownRunError(f"{self.path}: {name!r} means {len(found)} runs: {names}; name one")
        return found[0]


class RunReader(RunFolder):
    """One run. `info` is run.json, empty where that is damaged; a journal that is still growing is read as it is now."""

    @property
    def config(self) -> Any:
        """As given when the run began, secrets masked; what a later attempt was given is in its `attempt` event."""
        return self.info.get("config")

    def writers(self) -> list["WriterReader"]:
        """By attempt, the lead writer first."""
        order = {attempt.id: place for place, attempt in enumerate(self.attempts())}
        found = [WriterReader(path, self.info.get("run")) for path in layout.writers(self.path)]
        return sorted(found, key=lambda one: (order.get(one.attempt, len(order)), not one.is_lead, one.id))

    def metrics(self) -> pa.Table:
        """Columns: the common ones, then key, value, exact, kind; see docs/format.md. Ordered by (attempt, writer, seq)."""
        return self._table("metrics")

    def generations(self) -> pa.Table:
        """Columns: the common ones, then split, index, input, output, label, score, extra (JSON)."""
        return self._table("generations")

    def spans(self) -> pa.Table:
        """One row per span: its end where it has ended, its start (status OPEN, end null) where it has not."""
        return last_state(self._table("spans"))

    def events(self) -> pa.Table:
        """Columns: the common ones, then kind and body (JSON)."""
        return self._table("events")

    def damage(self, writers: list["WriterReader"] | None = None) -> list[Damage]:
        """Whatever is not as it was written, or absent; reads every byte (of `writers`, where they are at hand)."""
        writers = self.writers() if writers is None else writers
        in_writers = [damage for writer in writers for damage in writer.damage()]
        return self.info_damage + in_writers + self.missing(writers) + self.file_damage(writers)

    def losses(self, writers: list["WriterReader"] | None = None) -> list[Loss]:
        """What the writers say of records that their disks did not take. No damage: the journals are as they were written."""
        return [one for writer in (self.writers() if writers is None else writers) for one in writer.losses()]

    def missing(self, writers: list["WriterReader"]) -> list[Damage]:
        """Writers that are absent or end too early, as finish records and later attempts tell."""
        found = {writer.id: writer.last_seq for writer in writers}
        said = (one for writer in writers for one in writer.positions_of_others())
        return chain.missing_of_writers(self.path, found, said)

    def file_damage(self, writers: list["WriterReader"]) -> list[Damage]:
        """Saved files that are absent, or whose content is not what they are named after."""
        folder = self.path / format.FILES_FOLDER
        here = {path.name: path for path in sorted(folder.glob("[!.]*"))}
        changed = [
            Damage(str(path), 0, path.stat().st_size, "not the file that was saved: its sha256 is another")
            for name, path in here.items()
            if files.sha256_file(path) != name
        ]
        saved = {sha256: name for writer in writers for name, sha256 in writer.saved_files()}
        absent = [
            Damage(str(folder / sha256), 0, 0, f"the file saved as {name}", fetch=chain.place(folder / sha256, 3))
            for sha256, name in saved.items()
            if sha256 not in here
        ]
        return changed + absent

    def _table(self, name: str) -> pa.Table:
        pieces = [piece for writer in self.writers() for piece in writer.batches(name)]
        return pa.concat_tables([table.schema(name).empty_table(), *pieces]).unify_dictionaries()


class WriterReader:
    """One writer's records, from its segments and journals. What was scanned is remembered; make a new one to see more."""

    def __init__(self, path: Path, run_id: str | None = None) -> None:
        """`run_id`: as run.json says; by default the folder's name."""
        self.path = path
        self.id = path.name
        self.run_id = run_id or path.parent.name
        self.header = layout.header(path)
        self.attempt: str = self.header.get("attempt", {}).get("id", "unknown")
        self.is_lead = bool(self.header.get("lead"))
        self._damage: list[Damage] = []
        self._parts = self._find_parts()

    def _find_parts(self) -> list[Part]:
        """Segments, and journals (or what of one is longer than its segment), in seq order."""
        parts: list[Part] = []
        sources = layout.sources(self.path)
        for source in sources:
            segment = self._segment(source)
            start = 0
            if segment is not None:
                parts.append(segment)
                start = segment.journal_length
            with suppress(FileNotFoundError):  # sealed long enough ago to be removed just now
                if source.journal is not None and (segment is None or source.journal.stat().st_size > start):
                    journal = scan(source.journal, start)
                    parts += [journal] if self._is_own(journal) else []
        self._damage += chain.check(self.path, sources, parts)
        return parts

    def _segment(self, source: layout.Source) -> Segment | None:
        if source.segment is None:
            return None
        path = source.segment / format.MANIFEST_FILE
        try:
            segment = Segment(source.segment)
        except FileNotFoundError:
            self._damage.append(Damage(str(path), 0, 0, "the manifest of this segment", fetch=chain.place(path, 4)))
        except (OSError, ValueError) as error:
            reason = f"manifest unreadable ({error}); its Parquet files are not read"
            self._damage.append(Damage(str(path), 0, path.stat().st_size, reason))
        else:
            return segment if self._is_own(segment) else None
        return None

    def _is_own(self, part: Part) -> bool:
        damage = chain.foreign(part, self.run_id, self.id)
        self._damage += [damage] if damage else []
        return damage is None

    @property
    def parts(self) -> list[Part]:
        """Segments, and journals (or what of one is longer than its segment), in seq order."""
        return self._parts

    def complete_seq(self, accepted: Container[Damage] = ()) -> int:
        """How far a cursor may go: up to the first record that is absent and may still be fetched, unless that is accepted."""
        absent = [*self._damage, *(one for part in self._parts for one in self._unreadable(part))]
        fetched_later = [one.first_seq - 1 for one in absent if one.fetch and one.first_seq and one not in accepted]
        return min([self.last_seq, *fetched_later])

    def _unreadable(self, part: Part) -> list[Damage]:
        """Damaged files of a segment whose journal, which would be read in their place, is gone."""
        if isinstance(part, Scan) or (self.path / format.journal_name(part.first_number)).is_file():
            return []
        return part.damage()

    def positions_of_others(self) -> Iterator[tuple[str, str, int]]:
        """(who says so, writer, last seq): what this writer has seen of the run's writers when it began, and when it finished."""
        for part in self._parts:
            for writer, seq in (chain.header_of(part).get("continues") or {}).get("positions", {}).items():
                yield f"attempt {self.attempt}", writer, int(seq)
        if self.is_lead:
            for batch in self.batches("events", after_seq=self.last_seq - 1):
                for row in batch.slice(0, 1).to_pylist():
                    if row["kind"] == "finish":
                        for writer, one in format.load_json(row["body"].encode()).get("roster", {}).items():
                            yield "the run's finish record", writer, int(one["seq"])

    def losses(self) -> list[Loss]:
        """By this writer's own word, an entry each time that its disk did not take everything."""
        return loss.episodes(self.id, ((ts, body) for kind, ts, body in self._notable if kind == "loss"))

    def saved_files(self) -> Iterator[tuple[str, str]]:
        """(name, sha256) of every file that was saved."""
        for kind, _, body in self._notable:
            if kind == "file":
                yield body["name"], body["sha256"]

    @cached_property
    def _notable(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(kind, ns, body) of the events that tell of losses and files: one pass for both."""
        found = []
        for batch in self.batches("events"):
            rows = batch.filter(pc.is_in(batch["kind"].cast(pa.string()), value_set=pa.array(["loss", "file"])))
            columns = (rows["kind"], rows["ts"].cast(pa.int64()), rows["body"])
            for kind, ts, body in zip(*(column.to_pylist() for column in columns), strict=True):
                found.append((kind, ts, format.load_json(body.encode())))
        return found

    @property
    def last_seq(self) -> int:
        return max((part.last_seq for part in self._parts), default=0)

    def finish(self) -> tuple[str, int] | None:
        """(status, ns) of the finish record, None when there is none."""
        end = layout.last(self.path).end
        return (end["status"], end["ts"]) if end is not None and "ts" in end else None

    @property
    def finished(self) -> bool:
        return self.finish() is not None

    def is_alive(self) -> bool | None:
        """Whether its process is alive: True or False where that is proven, here or when it was sealed, None elsewhere."""
        return is_alive(self.header, layout.last(self.path))

    def batches(self, name: str, after_seq: int = 0, max_rows: int = MAX_ROWS) -> Iterator[pa.Table]:
        """Rows of a table with seq > after_seq, in seq order, whole records, bounded in rows and text."""
        identity = table.Identity(self.path.parent.name, self.id, self.attempt)
        done = after_seq
        for known in self._parts:
            if known.last_seq <= done:
                continue
            part = self._readable(known, name)
            if isinstance(part, Segment):
                yield from part.batches(name, done, max_rows)
            elif part is not None:
                for _, batch in table.batches(part.records(done, table.MARKS[name]), identity, [name], max_rows):
                    yield pa.Table.from_batches([batch])
            done = max(done, known.last_seq, part.last_seq if part is not None else 0)

    def _readable(self, part: Part, name: str) -> Part | None:
        """Where a part's records are now: of a damaged segment in its journal, of a journal sealed and removed in its segment."""
        if isinstance(part, Segment):
            if part.is_intact(name):
                return part
            path = self.path / format.journal_name(part.manifest["number"])
            journal = scan(path) if path.is_file() else None
            return journal if journal is None or chain.foreign(journal, self.run_id, self.id) is None else None
        if part.path.is_file():
            return part
        segment = Segment(self.path / format.segment_name(int(part.path.stem)))
        return segment if segment.is_intact(name) else None

    def damage(self) -> list[Damage]:
        """What of this writer's records is damaged or missing. Reads every file of its segments."""
        in_segments = [damage for part in self._parts if isinstance(part, Segment) for damage in part.damage()]
        return in_segments + self._damage


def last_state(spans: pa.Table) -> pa.Table:
    """Rows of spans → one row per span, the last recorded, in the order of their first record."""
    if not spans.num_rows:
        return spans
    keys = zip(spans["trace_id"].to_pylist(), spans["span_id"].to_pylist(), strict=True)
    last = {key: at for at, key in enumerate(keys)}
    return spans.take(pc.cast(pa.array(list(last.values())), pa.int64()))
