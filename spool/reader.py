"""The reader: a spool's runs and their tables, over segments plus live journals. Writes nothing, never raises for damage.

Order is (writer, seq), never the clock. Damage is listed by `damage()`; everything undamaged is delivered.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spool import files, format, layout, liveness, table
from spool.errors import NotASpoolError, UnknownRunError
from spool.journal import Damage, Scan, scan
from spool.segment import Segment

MAX_ROWS = 1 << 16


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands.

    `state`: finished, failed, preempted or killed once the lead writer's finish in the latest attempt, or the death of
    all its writers (then `proven_death`), says so; otherwise running (a writer is provably alive) or unknown.
    """

    state: str
    end_ns: int | None = None
    proven_death: bool = False


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
        runs = self.runs()
        exact = [run for run in runs if run.id == name]
        found = exact or [
            run
            for run in runs
            if run.id.startswith(name)
            or fnmatchcase(run.id, name)
            or fnmatchcase(f"{run.project}/{run.experiment}", name)
        ]
        if not found:
            raise UnknownRunError(f"{self.path}: no run {name!r}; `spool ls {self.path}` lists them")
        return found

    def run(self, name: str) -> "RunReader":
        """The one run that a name means. Raises UnknownRunError, listing the candidates, when there are several."""
        found = self.select(name)
        if len(found) > 1:
            names = ", ".join(run.id for run in found[:10])
            raise UnknownRunError(f"{self.path}: {name!r} means {len(found)} runs: {names}; name one")
        return found[0]


class RunReader:
    """One run. `info` is run.json, empty where that is damaged; a journal that is still growing is read as it is now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.info: dict[str, Any] = {}
        self.info_damage: list[Damage] = []
        try:
            self.info = layout.run_info(path)
        except NotASpoolError as error:
            self.info_damage.append(Damage(str(path / format.RUN_FILE), 0, 0, str(error).split(": ", 1)[1]))
        self.project: str = self.info.get("project", "unknown")
        self.experiment: str = self.info.get("experiment", "unknown")
        self.created_ns: int = self.info.get("created_ns", 0)

    @property
    def config(self) -> Any:
        """As given when the run began, secrets masked; what a later attempt was given is in its `attempt` event."""
        return self.info.get("config")

    def attempts(self) -> list[layout.Attempt]:
        """Oldest first."""
        return layout.attempts(self.path)

    def writers(self) -> list["WriterReader"]:
        """By attempt, the lead writer first."""
        order = {attempt.id: place for place, attempt in enumerate(self.attempts())}
        found = [WriterReader(path) for path in layout.writers(self.path)]
        return sorted(found, key=lambda one: (order.get(one.attempt, len(order)), not one.is_lead, one.id))

    def status(self) -> RunStatus:
        attempts = self.attempts()
        latest = [one for one in self.writers() if attempts and one.attempt == attempts[-1].id]
        for writer in latest:
            finish = writer.finish() if writer.is_lead else None
            if finish is not None:
                return RunStatus(finish[0], finish[1])
        alive = [writer.is_alive() for writer in latest if writer.finish() is None]
        if True in alive:
            return RunStatus("running")
        if alive and None not in alive:
            return RunStatus("failed", max(writer.last_ts() for writer in latest), proven_death=True)
        return RunStatus("unknown")

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

    def damage(self) -> list[Damage]:
        in_writers = [damage for writer in self.writers() for damage in writer.damage()]
        return self.info_damage + in_writers + self.file_damage()

    def file_damage(self) -> list[Damage]:
        """Saved files whose content is not what they are named after."""
        return [
            Damage(str(path), 0, path.stat().st_size, "not the file that was saved: its sha256 is another")
            for path in sorted(self.path.glob("files/[!.]*"))
            if files.sha256_file(path) != path.name
        ]

    def _table(self, name: str) -> pa.Table:
        pieces = [piece for writer in self.writers() for piece in writer.batches(name)]
        return pa.concat_tables([table.schema(name).empty_table(), *pieces]).unify_dictionaries()


class WriterReader:
    """One writer's records, from its segments and journals. What was scanned is remembered; make a new one to see more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.header = layout.header(path)
        self.attempt: str = self.header.get("attempt", {}).get("id", "unknown")
        self.is_lead = bool(self.header.get("lead"))
        self._damage: list[Damage] = []
        self._parts = self._find_parts()

    def _find_parts(self) -> list["Segment | Scan"]:
        """Segments, and journals (or what of one is longer than its segment), in seq order."""
        parts: list[Segment | Scan] = []
        sources = layout.sources(self.path)
        for source in sources:
            segment = self._segment(source)
            if segment is not None:
                parts.append(segment)
                with suppress(FileNotFoundError):  # sealed long enough ago to be removed just now
                    if source.journal is not None and source.journal.stat().st_size > segment.journal_length:
                        parts.append(scan(source.journal, start=segment.journal_length))
            elif source.journal is not None:
                parts.append(scan(source.journal))
        self._check_chain(sources, parts)
        return parts

    def _segment(self, source: layout.Source) -> Segment | None:
        if source.segment is None:
            return None
        try:
            return Segment(source.segment)
        except (OSError, ValueError) as error:
            path = source.segment / format.MANIFEST_FILE
            self._damage.append(
                Damage(str(path), 0, 0, f"manifest unreadable ({error}); its Parquet files are not read")
            )
            return None

    def _check_chain(self, sources: list[layout.Source], parts: list["Segment | Scan"]) -> None:
        """Every seq must follow the one before it across files, and only the last journal may have a torn tail."""
        expected = 1
        last_number = sources[-1].number if sources else 0
        for part in parts:
            if isinstance(part, Segment):
                path, first, last = part.folder, int(part.manifest["first_seq"]), part.last_seq
                found = part.recorded_damage
            else:
                path, found = part.path, part.damage
                first = (part.header or {}).get("first_seq", part.seqs[0] if part.seqs and expected > 1 else expected)
                last = part.last_seq if part.seqs or part.header else expected - 1
                if part.is_torn and int(path.stem) != last_number and not self._was_given_up(part, parts):
                    reason = "incomplete last line of a journal that was followed by another"
                    self._damage.append(Damage(str(path), part.valid_length, part.size - part.valid_length, reason))
            named = any(one.first_seq == expected and one.last_seq == first - 1 for one in self._damage)
            if first > expected and not named:
                self._damage.append(
                    Damage(str(path), 0, 0, "journal or segment missing before this", expected, first - 1)
                )
            expected = max(expected, last + 1)
            self._damage += self._broken_link(parts, part)
            self._damage += [self._resolve(one, part, parts) for one in found]
        if sources and last_number not in map(_number, parts):
            reason = "the last segment cannot be read, and its journal is gone"
            self._damage.append(Damage(str(sources[-1].segment), 0, 0, reason, expected, None))

    def _broken_link(self, parts: list["Segment | Scan"], part: "Segment | Scan") -> list[Damage]:
        """Whether the journal before `part` is the one that its header names by length and sha256."""
        link = _header(part).get("previous")
        before = parts[parts.index(part) - 1] if parts.index(part) else None
        if link is None or before is None or _number(before) != _number(part) - 1:
            return []  # what is missing is reported as missing
        if isinstance(before, Segment):
            path, found = before.folder, before.manifest["journal"]
            is_damaged = bool(before.recorded_damage)
        else:
            path, found = before.path, {"length": before.valid_length, "sha256": before.sha256}
            is_damaged = bool(before.damage) or before.header is None  # reported already, or only a journal's end
        if is_damaged or found == link:
            return []
        return [
            Damage(
                str(path),
                0,
                found["length"],
                f"not the journal that {format.journal_name(_number(part))} follows: its sha256 is another",
            )
        ]

    def _resolve(self, damage: Damage, part: "Segment | Scan", parts: list["Segment | Scan"]) -> Damage:
        """What a damaged last line held, only the first seq of the next journal tells."""
        if damage.first_seq is None or damage.last_seq is not None:
            return damage
        following = parts[parts.index(part) + 1 :]
        for one in following:
            header = _header(one)
            if header:
                last = int(header["first_seq"]) - 1
                known = (damage.first_seq, last) if last >= damage.first_seq else (None, None)
                return Damage(damage.path, damage.offset, damage.length, damage.reason, *known)
        return damage

    def _was_given_up(self, part: Scan, parts: list["Segment | Scan"]) -> bool:
        """Whether the writer itself left this tail behind: the next journal names the valid length before it."""
        for one in parts[parts.index(part) + 1 :]:
            previous = _header(one).get("previous") or {}
            return bool(previous.get("length") == part.valid_length)
        return False

    @property
    def last_seq(self) -> int:
        return max((part.last_seq for part in self._parts), default=0)

    def finish(self) -> tuple[str, int] | None:
        """(status, ns) of the finish record, None when there is none."""
        last = self._last_record()
        if last is not None and last[0] == "finish":
            return format.load_json(last[1].encode())["status"], last[2]
        return None

    @property
    def finished(self) -> bool:
        return self.finish() is not None

    def is_alive(self) -> bool | None:
        """Whether its process is alive: True or False where that is proven, here or when it was sealed, None elsewhere."""
        if (layout.end(self.path) or {}).get("status") == "died":
            return False
        return liveness.is_alive(self.header)

    def last_ts(self) -> int:
        """ns of the writer's last record, or of its beginning."""
        newest = int(self.header.get("created_ns", 0))
        for name in format.TABLES:
            for batch in self.batches(name, after_seq=max(0, self.last_seq - 1)):
                newest = max(newest, batch.column("ts")[-1].cast(pa.int64()).as_py())
        return newest

    def _last_record(self) -> tuple[str, str, int] | None:
        """(kind, body, ns) of the last record when it is an event."""
        for batch in self.batches("events", after_seq=self.last_seq - 1):
            row = batch.slice(0, 1)
            ts = row.column("ts")[0].cast(pa.int64()).as_py()
            return row.column("kind")[0].as_py(), row.column("body")[0].as_py(), ts
        return None

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
                for _, batch in table.batches(part.records(done), identity, [name], max_rows):
                    yield pa.Table.from_batches([batch])
            done = max(done, known.last_seq)

    def _readable(self, part: "Segment | Scan", name: str) -> "Segment | Scan | None":
        """Where a part's records are now: of a damaged segment in its journal, of a journal sealed and removed in its segment."""
        if isinstance(part, Segment):
            if part.is_intact(name):
                return part
            journal = self.path / format.journal_name(part.manifest["number"])
            return scan(journal) if journal.is_file() else None
        if part.path.is_file():
            return part
        segment = Segment(self.path / format.segment_name(int(part.path.stem)))
        return segment if segment.is_intact(name) else None

    def damage(self) -> list[Damage]:
        """What of this writer's records is damaged or missing. Reads every file of its segments."""
        in_segments = [damage for part in self._parts if isinstance(part, Segment) for damage in part.damage()]
        return in_segments + self._damage


def _header(part: Segment | Scan) -> dict[str, Any]:
    return (part.manifest.get("header") if isinstance(part, Segment) else part.header) or {}


def _number(part: Segment | Scan) -> int:
    return int(part.manifest["number"]) if isinstance(part, Segment) else int(part.path.stem)


def last_state(spans: pa.Table) -> pa.Table:
    """Rows of spans → one row per span, the last recorded, in the order of their first record."""
    if not spans.num_rows:
        return spans
    keys = zip(spans["trace_id"].to_pylist(), spans["span_id"].to_pylist(), strict=True)
    last = {key: at for at, key in enumerate(keys)}
    return spans.take(pc.cast(pa.array(list(last.values())), pa.int64()))
