"""Power cut: whatever the disk keeps of what was not synced, the spool opens, holds what was promised, and lies about nothing.

Real code runs on a folder that records (disk.py). Every state that a cut after each operation may leave is then built,
read by every reader, and compared with what was logged and what had been promised by then.
"""

import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from disk import Disk, Killed, Link, Operation, Rename, Sync, Tree, Truncate, Unlink, Write, fingerprint, put
from journals import Row, begin_without_thread, covered, whole_rows

import spool
from spool import claim, cursor, environment, files, format, layout, liveness, process, seal
from spool.errors import NotASpoolError, SealError
from spool.live import Held, LiveJournal
from spool.run import Run
from spool.writer import Writer

LIMIT, LIMIT_SLOW = 24, 4096  # 4096: all combinations of six writes
RESUMED, RESUMED_SLOW = 16, 2  # one state of so many is resumed and sealed, too
PUBLISHED = (".json", ".parquet")
RAM = Path("/dev/shm")

Rows = dict[str, dict[str, list[Row]]]
"""By writer and table."""


@dataclass
class Found:
    """What the readers say of one state."""

    tree: Tree
    problems: list[str] = field(default_factory=list)
    rows: Rows = field(default_factory=dict)
    """Of run "r"; a writer that is there is in it, with or without rows."""
    headers: set[str] = field(default_factory=set)
    """Writers whose first line says who they are."""
    state: str | None = None
    """Of run "r"; None when it is not there."""

    def seqs(self, writer: str) -> set[int]:
        return {seq for rows in self.rows.get(writer, {}).values() for seq, _ in rows}


@dataclass(frozen=True)
class Promise:
    """What must hold at every cut after `at` operations."""

    at: int
    what: str
    holds: Callable[[Found], bool]


@dataclass
class Story:
    """Real code at work on a recorded folder, with what it has promised on the way."""

    disk: Disk
    promises: list[Promise] = field(default_factory=list)
    logged: Rows = field(default_factory=dict)
    start: int = 0
    """A cut before this operation is another story's."""

    @property
    def root(self) -> Path:
        return self.disk.root

    def promise(self, what: str, holds: Callable[[Found], bool]) -> None:
        self.promises.append(Promise(len(self.disk.history), what, holds))

    def begin(self, **settings: Any) -> Run:
        run = begin_without_thread(self.root, run_id="r", **settings)
        name = writer_of(run).id
        self.promise("init() returned: the run and its writer are there", lambda found: name in found.headers)
        return run

    def goes_on(self) -> None:
        """What has been so far is told by another story."""
        self.start = len(self.disk.history)

    def promise_logged(self, run: Run, what: str) -> None:
        """All records so far."""
        writer = writer_of(run)
        name, seqs = writer.id, set(range(1, writer.seq + 1))
        self.promise(f"{what}: seq 1 to {writer.seq}", lambda found: seqs <= found.seqs(name))

    def read_at_the_end(self) -> None:
        if (self.root / "spool" / "r" / format.RUN_FILE).is_file():
            self.logged = whole_rows(spool.open(self.root / "spool").run("r"))

    def violations(self, *, limit: int = LIMIT, resumed: int = RESUMED) -> list[str]:
        """All that is wrong in any state that a cut may leave."""
        self.read_at_the_end()
        chance = random.Random(len(self.disk.history))
        known: dict[bytes, Found] = {}
        wrong: list[str] = []
        for at in range(max(self.start, self.disk.start), len(self.disk.history) + 1):
            for tree in self.disk.states(at, limit, chance):
                name = fingerprint(tree)
                if name not in known:
                    known[name] = self._read(tree, go_on=len(known) % resumed == 0)
                found = known[name]
                broken = [one.what for one in self.promises if one.at <= at and not one.holds(found)]
                wrong += [f"cut after {at} operations: {one}; left: {_names(tree)}" for one in found.problems + broken]
        assert known, "nothing was recorded"
        return wrong

    def _read(self, tree: Tree, *, go_on: bool) -> Found:
        found = Found(tree)
        with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as folder:
            put(tree, Path(folder))
            look(Path(folder) / "spool", self.logged, found)
            if go_on and not found.problems:
                seal_all(Path(folder) / "spool", self.logged, found)
                resume(Path(folder), found)
        return found


def _names(tree: Tree) -> str:
    return ", ".join(f"{name} ({'folder' if content is None else len(content)})" for name, content in tree.items())


def look(root: Path, logged: Rows, found: Found) -> None:
    """Everything that may be asked of a state, and what is wrong in the answers."""
    if not root.is_dir():
        return
    try:
        runs = {run.id: run for run in spool.open(root).runs()}
    except NotASpoolError:
        return
    run = runs.get("r")
    if run is None:
        return
    run.attempts(), run.metrics(), run.generations(), run.spans(), run.events()
    found.state = run.status().state
    found.rows = whole_rows(run)
    found.headers = {writer.id for writer in run.writers() if writer.header}
    damage = run.damage()
    for one in damage:
        if " counts records to " in one.reason:  # what another writer had seen of this one before it was synced
            continue
        is_journal = one.path.endswith(".jsonl")
        if (
            (one.fetch and not is_journal)
            or Path(one.path).suffix in PUBLISHED
            or Path(one.path).parent.name == "files"
        ):
            found.problems.append(f"what is published is absent or damaged: {one}")
    for writer, tables in found.rows.items():
        for name, rows in tables.items():
            expected = logged.get(writer, {}).get(name, [])
            if sorted(rows) != rows or not is_part(rows, expected):
                found.problems.append(f"{writer} {name}: not what was logged, once, in order: {rows}")
        seqs = found.seqs(writer)
        reported = covered(damage, run.path / writer)
        silent = [seq for seq in range(1, max(seqs, default=0)) if seq not in seqs]
        silent = [seq for seq in silent if not any(seq in some for some in reported)]
        if silent:
            found.problems.append(f"{writer}: seq {silent} is absent, and that is not reported: {damage}")


def is_part(rows: list[Row], expected: list[Row]) -> bool:
    """Whether the records are whole, each one of those expected, in their order."""
    seqs = {seq for seq, _ in rows}
    return rows == [row for row in expected if row[0] in seqs]


def seal_all(root: Path, logged: Rows, found: Found) -> None:
    """As `spool seal` does: the rows stay as they are, before and after the journals go."""
    for writer in found.rows:
        for journal in sorted((root / "r" / writer).glob("*.jsonl")):
            try:
                seal.seal(journal, writer_died=True)
            except SealError:  # a journal without any header: nothing in it was ever promised
                if found.seqs(writer):
                    found.problems.append(f"{journal} cannot be sealed")
            seal.remove_sealed(journal)
    if found.rows:
        _look_again(root, logged, found, "sealing")


def resume(folder: Path, found: Found) -> None:
    """A new attempt begins on what is left, and all is there: what was, and what it adds."""
    run = begin_without_thread(folder, run_id="r", resume=True, durability="os")
    run.log({"after": 0.1}, step=7)
    added = writer_of(run).id
    try:
        _look_again(folder / "spool", whole_rows(spool.open(folder / "spool").run("r")), found, "a new attempt", added)
    finally:
        let_go(run)


def _look_again(root: Path, logged: Rows, found: Found, after: str, added: str | None = None) -> None:
    again = Found(found.tree)
    look(root, logged, again)
    found.problems += [f"after {after}: {one}" for one in again.problems]
    new = again.rows.pop(added, None) if added else None
    if again.rows != found.rows:
        found.problems.append(f"after {after} the rows are others: {again.rows}, before: {found.rows}")
    if added and (new is None or not any("'after', 0.1" in row for _, row in new["metrics"])):
        found.problems.append(f"after {after}: what it logged is not there: {again.rows}")


def writer_of(run: Run) -> Writer:
    assert run._writer is not None
    return run._writer


def let_go(run: Run) -> None:
    """The end of its process, in so far as this process can have one."""
    process.closed(run)
    if run._status is None:
        writer_of(run).abandon()


def seal_here(journal: Path, redundant: Any = (), nice: int = 0) -> "subprocess.Popen[bytes]":
    """What the sealing child does, in this process, where it is recorded."""
    assert nice in (0, seal.NICE)
    seal.seal(journal)
    for path in redundant:
        seal.remove_sealed(path)
    return subprocess.Popen(["true"])


@pytest.fixture(autouse=True)
def _another_boot(monkeypatch):
    """After a power cut no process is what it was; where the run came from is asked once, not at every state."""
    monkeypatch.setattr(environment, "describe", dict)
    monkeypatch.setattr(liveness, "_boot_id", lambda: os.urandom(8).hex())
    monkeypatch.setattr(seal, "start", seal_here)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=RAM if RAM.is_dir() else None) as made:
        yield Path(made)


@contextmanager
def telling(root: Path) -> Iterator[Story]:
    story = Story(Disk(root))
    with story.disk.recording():
        yield story


def check(story: Story, **settings: int) -> None:
    wrong = story.violations(**settings)
    assert not wrong, f"{len(wrong)} violations\n" + "\n".join(wrong[:3])


# --- what a run does


def begins(story: Story) -> None:
    story.begin()


def logs_and_flushes(story: Story) -> None:
    run = story.begin()
    story.goes_on()
    run.log({"loss": 0.25, "nan": float("nan")}, step=1)
    run.log_generations(step=1, rows=[{"input": "6*7=", "output": "42", "score": 1.0}])
    run.flush()
    story.promise_logged(run, "flush() returned")
    run.log({"loss": 0.125}, step=2)
    with run.span("tool", step=2, inputs={"a": 1}):
        pass


def logs_at_intervals(story: Story) -> None:
    run = story.begin(durability="interval")
    story.goes_on()
    for step in range(4):
        run.log({"loss": step / 3}, step=step)
        if step % 2:
            writer_of(run)._tick()
            story.promise_logged(run, "synced in the background")


def logs_with_durability_record(story: Story) -> None:
    run = story.begin(durability="record")
    story.goes_on()
    story.promise_logged(run, "init() returned")
    for step in range(3):
        run.log({"loss": step / 3}, step=step)
        story.promise_logged(run, "log() returned")


def logs_with_durability_os(story: Story) -> None:
    run = story.begin(durability="os")
    story.goes_on()
    for step in range(3):
        run.log({"loss": step / 3}, step=step)
        writer_of(run)._tick()


def rotates(story: Story, durability: str = "interval") -> None:
    run = story.begin(durability=durability)
    story.goes_on()
    run.log({"loss": 0.25}, step=1)
    writer_of(run)._rotate()
    story.promise_logged(run, "rotated")
    run.log({"loss": 0.5}, step=2)
    if durability == "record":
        story.promise_logged(run, "log() returned")
    writer_of(run)._rotate()
    story.promise_logged(run, "rotated")
    run.log({"loss": 0.75}, step=3)
    run.flush()
    story.promise_logged(run, "flush() returned")


def rotates_with_durability_record(story: Story) -> None:
    rotates(story, "record")


def seals(story: Story) -> None:
    run = story.begin(durability="os")
    run.log({"loss": 0.25, "text": "é"}, step=1)
    run.log_generations(step=1, rows=["42"])
    journal = writer_of(run).path
    writer_of(run)._rotate()
    story.goes_on()
    run.log({"loss": 0.5}, step=2)
    seal.seal(journal)
    writer, seqs = writer_of(run).id, {1, 2, 3}
    story.promise("sealed", lambda found: seqs <= found.seqs(writer))


def seals_and_removes(story: Story) -> None:
    run = story.begin(durability="os")
    story.goes_on()
    for step in range(2):
        run.log({"loss": step / 3}, step=step)
        journal = writer_of(run).path
        writer_of(run)._rotate()
        seal.seal(journal)
        story.promise_logged(run, "sealed")
        assert seal.remove_sealed(journal)


def finishes(story: Story, durability: str = "interval") -> None:
    run = story.begin(durability=durability)
    story.goes_on()
    run.log({"loss": 0.25}, step=1)
    run.finish()
    story.promise_logged(run, "finish() returned")
    story.promise("finish() returned: the run is finished", lambda found: found.state == "finished")


def finishes_with_durability_os(story: Story) -> None:
    finishes(story, "os")


def resumes(story: Story) -> None:
    run = story.begin()
    run.log({"loss": 0.25}, step=1)
    run.flush()
    story.promise_logged(run, "flush() returned")
    run.log({"loss": 0.5}, step=2)
    let_go(run)
    story.goes_on()
    resumed = story.begin(resume=True)
    resumed.log({"loss": 0.5}, step=2)
    resumed.flush()
    story.promise_logged(resumed, "flush() of the second attempt returned")


def joins(story: Story) -> None:
    lead = story.begin()
    story.goes_on()
    worker = story.begin(role="worker")
    worker.log({"reward": 1.0}, step=1)
    lead.finish()
    worker.finish()
    story.promise_logged(worker, "finish() of a worker returned")


def saves(story: Story) -> None:
    content = b"lr: 1.0\n" * 10
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        run = story.begin()
        story.goes_on()
        run.save(file.name)
        saved = f"spool/r/files/{files.sha256_file(Path(file.name))}"
        story.promise("save() returned", lambda found: found.tree.get(saved) == content)
        run.save(file.name)
    run.flush()
    story.promise_logged(run, "flush() returned")


WORKLOADS = [
    begins,
    logs_and_flushes,
    logs_at_intervals,
    logs_with_durability_record,
    logs_with_durability_os,
    rotates,
    rotates_with_durability_record,
    seals,
    seals_and_removes,
    finishes,
    finishes_with_durability_os,
    resumes,
    joins,
    saves,
]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_power_cut_at_any_moment_leaves_what_was_promised_and_nothing_wrong(folder, workload):
    with telling(folder) as story:
        workload(story)
    check(story)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_power_cut_in_all_combinations_leaves_what_was_promised_and_nothing_wrong(folder, workload):
    with telling(folder) as story:
        workload(story)
    check(story, limit=LIMIT_SLOW, resumed=RESUMED_SLOW)


def flushes_during_a_rotation(story: Story) -> None:
    """What another thread does between the switch to the new journal and the sync of the old one."""
    run = story.begin()
    story.goes_on()
    run.log({"loss": 0.25}, step=1)
    real = writer_of(run)._live._switch

    def switch(new: int, held: Held) -> bool:
        switched = real(new, held)
        run.log({"loss": 0.5}, step=2)
        run.flush()
        story.promise_logged(run, "flush() returned in the middle of a rotation")
        return switched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_of(run)._live, "_switch", switch)
        writer_of(run)._rotate()


def test_a_flush_in_the_middle_of_a_rotation_keeps_its_promise(folder):
    with telling(folder) as story:
        flushes_during_a_rotation(story)
    check(story)


# --- one change at a time: before or after, in every combination

Moment = Callable[[], object]


def a_new_file(root: Path) -> list[Moment]:
    return [lambda: files.publish_file(root / "run.json", b"0123456789")]


def a_replaced_file(root: Path) -> list[Moment]:
    return [lambda: files.replace_file(root / "file", b"old"), lambda: files.replace_file(root / "file", b"newer")]


def a_saved_content(root: Path) -> list[Moment]:
    (root / ".source").write_bytes(b"lr: 1.0")
    return [
        lambda: files.make_folder(root / "files"),
        *2 * [lambda: files.publish_content(root / ".source", root / "files")],
    ]


def a_new_folder(root: Path) -> list[Moment]:
    def fill(folder: Path) -> None:
        (folder / "a.parquet.part").write_bytes(b"PAR1")
        (folder / "manifest.json.part").write_bytes(b"{}")

    return [lambda: files.publish_folder(root / "000001", fill)]


def a_removed_file(root: Path) -> list[Moment]:
    (root / "file").write_bytes(b"content")
    return [lambda: files.remove(root / "file")]


def a_saved_cursor(root: Path) -> list[Moment]:
    saved = cursor.load(root, "mlflow", "1", "r")
    other = cursor.load(root, "mlflow", "1", "r")
    other.delivered = {"w": {"metrics": 7}}
    return [lambda: files.make_folder(root / "mlflow"), saved.save, other.save]


def an_unreadable_cursor(root: Path) -> list[Moment]:
    (root / "mlflow").mkdir()
    (root / "mlflow" / "1.json").write_bytes(b"\0\0")
    return [lambda: cursor.load(root, "mlflow", "1", "r")]


def a_claim(root: Path) -> list[Moment]:
    taken: list[Any] = []

    def release() -> None:
        taken.pop().release()

    return [lambda: taken.append(claim.take(root / "claim")), release]


def a_claim_taken_over(root: Path) -> list[Moment]:
    (root / "claim").write_bytes(b"\0\0")
    return [lambda: claim._discard(root / "claim"), lambda: claim.take(root / "claim")]


def seen(tree: Tree) -> Tree:
    """Without unfinished work."""
    return {name: content for name, content in tree.items() if not any(one.startswith(".") for one in name.split("/"))}


def now(root: Path) -> Tree:
    paths = {str(path.relative_to(root)): path for path in root.rglob("*")}
    return seen({name: path.read_bytes() if path.is_file() else None for name, path in paths.items()})


def mixtures(
    root: Path, prepare: Callable[[Path], list[Moment]], breakage: Callable[[], None] = lambda: None
) -> list[str]:
    """States that are neither what was before a change nor what is after it, in all combinations."""
    moments = prepare(root)
    disk = Disk(root)
    shown, returned = [now(root)], []
    with disk.recording():
        breakage()
        for moment in moments:
            moment()
            shown.append(now(root))
            returned.append(len(disk.history))
    wrong = []
    for at in range(disk.start, len(disk.history) + 1):
        done = sum(one <= at for one in returned)
        assert len(disk.unsynced(at)) <= 10, "too many for all combinations"
        wrong += [
            f"cut after {at} operations, {done} calls returned; left: {_names(tree)}"
            for tree in disk.states(at, 1 << 20, random.Random(0))
            if seen(tree) not in shown[done : done + 2]
        ]
    return wrong


CHANGES = [
    a_new_file,
    a_replaced_file,
    a_saved_content,
    a_new_folder,
    a_removed_file,
    a_saved_cursor,
    an_unreadable_cursor,
    a_claim,
    a_claim_taken_over,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_there_or_not_and_never_a_mixture(folder, change):
    assert mixtures(folder, change) == []


# --- killed, begun again, and then the power


def let_all_go() -> None:
    for run in list(process.open_runs):
        writer = writer_of(run)  # type: ignore[arg-type]
        writer._stop.set()
        writer._wake.set()
        writer._thread.join()
        let_go(run)  # type: ignore[arg-type]


def begins_again(story: Story) -> None:
    begin_without_thread(story.root, run_id="r")
    let_all_go()


def promises_to_begin(story: Story) -> None:
    story.begin(resume=True)


def a_journal(story: Story) -> Path:
    (writer,) = [path for path in layout.writers(story.root / "spool" / "r") if (path / "000002.jsonl").is_file()]
    return writer / "000001.jsonl"


def seals_again(story: Story) -> None:
    seal.seal(a_journal(story))


def promises_to_seal(story: Story) -> None:
    journal = a_journal(story)
    logged, writer = whole_rows(spool.open(story.root / "spool").run("r")), journal.parent.name
    seal.seal(journal)
    story.promise("sealed", lambda found: found.rows.get(writer) == logged[writer])
    assert seal.remove_sealed(journal)
    story.promise("sealed, and the journal removed", lambda found: found.rows.get(writer) == logged[writer])


def removes_again(story: Story) -> None:
    seal.seal(a_journal(story))
    seal.remove_sealed(a_journal(story))


def promises_to_remove(story: Story) -> None:
    journal = a_journal(story)
    logged, writer = whole_rows(spool.open(story.root / "spool").run("r")), journal.parent.name
    with suppress(FileNotFoundError):
        seal.remove_sealed(journal)
    seals = (journal.parent / "000001").is_dir()
    story.promise("sealed", lambda found: not seals or found.rows.get(writer) == logged[writer])


def saves_again(story: Story) -> None:
    files.publish_content(story.root / ".source", story.root / "spool" / "r" / format.FILES_FOLDER)


def promises_to_save(story: Story) -> None:
    saves_again(story)
    saved = f"spool/r/files/{files.sha256_file(story.root / '.source')}"
    story.promise("saved", lambda found: found.tree.get(saved) == b"lr: 1.0")


def has_a_file_to_save(root: Path) -> None:
    begin_without_thread(root, run_id="r")
    let_all_go()
    (root / ".source").write_bytes(b"lr: 1.0")


def has_two_journals(root: Path) -> None:
    run = begin_without_thread(root, run_id="r", durability="os")
    for step in range(3):
        run.log({"loss": step / 3}, step=step)
    writer_of(run)._rotate()
    let_go(run)


def is_new(root: Path) -> None:
    assert not any(root.iterdir())


RESTARTS = [
    (is_new, begins_again, promises_to_begin),
    (has_two_journals, seals_again, promises_to_seal),
    (has_two_journals, removes_again, promises_to_remove),
    (has_a_file_to_save, saves_again, promises_to_save),
]


@pytest.mark.parametrize(("prepare", "killed", "again"), RESTARTS)
def test_what_was_killed_at_any_step_and_done_again_is_as_durable(folder, prepare, killed, again):
    for steps in range(1000):
        root = folder / str(steps)
        root.mkdir()
        prepare(root)
        with telling(root) as story:
            story.disk.die_after = steps
            with suppress(Killed):
                killed(story)
            is_over = story.disk.die_after > 0
            story.disk.die_after = None
            let_all_go()
            again(story)
        story.start = story.promises[0].at
        check(story, limit=LIMIT // 2, resumed=RESUMED)
        if is_over:
            return
    pytest.fail("it never ends")


# --- the suite finds what is broken


def skips(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    monkeypatch.setattr(where, name, lambda *_: None)


def no_sync_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, files, "sync_data")


def no_sync_of_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, files, "sync_folder")


def no_sync_of_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, files, "sync_file")


def no_sync_at_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, Writer, "sync")


def no_sync_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, LiveJournal, "_sync_record")


def no_sync_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    skips(monkeypatch, LiveJournal, "sync")


def folders_made_without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_folder(path: Path) -> None:
        if not path.is_dir():
            make_folder(path.parent)
            files.make_one_folder(path)

    monkeypatch.setattr(files, "make_folder", make_folder)


def renamed_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(target: Path, content: Any, name: Callable[[Path], None]) -> None:
        temporary = files._beside(target)
        descriptor = files.open_new(temporary)
        for block in content:
            files.write_all(descriptor, block)
        name(temporary)
        files.sync_data(descriptor)
        files.close(descriptor)
        files.sync_folder(target.parent)

    monkeypatch.setattr(files, "_publish", publish)


def replaced_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_file(target: Path, content: bytes) -> None:
        if target.exists():
            files.unlink(target)
        files.publish_file(target, content)

    monkeypatch.setattr(files, "replace_file", replace_file)


def removed_before_the_segment_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    real = files.sync_folder

    def publish_folder(target: Path, fill: Callable[[Path], None]) -> None:
        monkeypatch.setattr(files, "sync_folder", lambda path: None if path == target.parent else real(path))
        files_publish_folder(target, fill)

    def remove_sealed(journal: Path) -> bool:
        files.unlink(journal)
        monkeypatch.setattr(files, "sync_folder", real)
        files.sync_folder(journal.parent)
        return True

    files_publish_folder = files.publish_folder
    monkeypatch.setattr(files, "publish_folder", publish_folder)
    monkeypatch.setattr(seal, "remove_sealed", remove_sealed)


@pytest.mark.parametrize(
    ("breakage", "workload", "found"),
    [
        (no_sync_of_data, begins, "init() returned"),
        (no_sync_of_data, rotates, "rotated: seq 1 to 2"),
        (no_sync_of_folders, begins, "init() returned"),
        (no_sync_of_parquet, seals_and_removes, "what is published is absent or damaged"),
        (no_sync_at_flush, logs_and_flushes, "flush() returned"),
        (no_sync_of_records, logs_with_durability_record, "log() returned"),
        (no_sync_in_the_background, logs_at_intervals, "synced in the background"),
        (folders_made_without_sync, begins, "init() returned"),
        (renamed_before_the_sync, begins, "what is published is absent or damaged"),
        (removed_before_the_segment_is_durable, seals_and_removes, "sealed: seq 1 to 2"),
    ],
)
def test_a_broken_step_is_found(folder, monkeypatch, breakage, workload, found):
    with telling(folder) as story:
        breakage(monkeypatch)
        workload(story)
    assert any(found in one for one in story.violations(resumed=1 << 30))


@pytest.mark.parametrize(
    ("breakage", "change"),
    [
        (no_sync_of_data, a_new_file),
        (no_sync_of_folders, a_new_file),
        (renamed_before_the_sync, a_new_file),
        (replaced_in_place, a_replaced_file),
        (replaced_in_place, a_saved_cursor),
        (no_sync_of_data, a_saved_content),
        (no_sync_of_parquet, a_new_folder),
        (no_sync_of_folders, a_new_folder),
        (no_sync_of_folders, a_removed_file),
        (renamed_before_the_sync, a_claim),
    ],
)
def test_a_broken_change_is_found(folder, monkeypatch, breakage, change):
    assert mixtures(folder, change, lambda: breakage(monkeypatch))


# --- the disk itself

CREATE, WRITE, MORE, SYNC, SYNC_FOLDER = Link(0, "a", 1), Write(1, 0, b"abcd"), Write(1, 4, b"ef"), Sync(1), Sync(0)
RENAME, UNLINK, TRUNCATE = Rename(0, "b", 1), Unlink(0, "a", 1), Truncate(1, 1)
CUT: list[Tree] = [{"a": b""}, {"a": b"ab"}, {"a": b"\0\0\0\0"}]
WHOLE: Tree = {"a": b"abcd"}


@pytest.mark.parametrize(
    ("history", "left"),
    [
        ([CREATE], [{}, {"a": b""}]),
        ([CREATE, SYNC], [{}, {"a": b""}]),
        ([CREATE, SYNC_FOLDER], [{"a": b""}]),
        ([CREATE, WRITE], [{}, WHOLE, *CUT]),
        ([CREATE, WRITE, SYNC], [{}, WHOLE]),
        ([CREATE, WRITE, SYNC_FOLDER], [WHOLE, *CUT]),
        ([CREATE, WRITE, SYNC, SYNC_FOLDER], [WHOLE]),
        (
            [CREATE, SYNC_FOLDER, WRITE, SYNC, MORE],
            [WHOLE, {"a": b"abcdef"}, {"a": b"abcde"}, {"a": b"abcd\0\0"}],
        ),
        (
            [CREATE, SYNC_FOLDER, Write(1, 0, b"a"), Write(1, 1, b"b")],
            [{"a": one} for one in (b"", b"a", b"\0", b"ab", b"\0b", b"a\0", b"\0\0")],
        ),
        ([CREATE, WRITE, SYNC, RENAME], [{}, WHOLE, {"b": b"abcd"}]),
        ([CREATE, WRITE, SYNC, RENAME, SYNC_FOLDER], [{"b": b"abcd"}]),
        (
            [CREATE, SYNC_FOLDER, WRITE, RENAME],
            [{name: one} for name in "ab" for one in (b"", b"ab", b"\0\0\0\0", b"abcd")],
        ),
        ([CREATE, WRITE, SYNC, SYNC_FOLDER, UNLINK], [{}, WHOLE]),
        ([CREATE, WRITE, SYNC, SYNC_FOLDER, UNLINK, SYNC_FOLDER], [{}]),
        ([CREATE, WRITE, SYNC, SYNC_FOLDER, TRUNCATE], [WHOLE, {"a": b"a"}]),
    ],
)
def test_the_disk_leaves_what_posix_allows_and_nothing_else(folder, history: list[Operation], left):
    disk = Disk(folder)
    disk.history += history
    found = list(disk.states(len(disk.history), 1000, random.Random(0)))
    assert sorted(map(repr, found)) == sorted(map(repr, left))


def test_a_folder_that_is_lost_takes_what_is_in_it_along(folder):
    disk = Disk(folder)
    with disk.recording():
        files.make_one_folder(folder / "a")
        files.publish_file(folder / "a" / "b", b"content")
    found = list(disk.states(len(disk.history), 1000, random.Random(0)))
    assert found == [{"a": None, "a/b": b"content"}, {}]


def test_what_was_there_before_is_durable_and_a_sample_holds_the_extremes(folder):
    (folder / "old").write_bytes(b"old")
    disk = Disk(folder)
    with disk.recording():
        descriptor = files.create_append(folder / "new")
        for at in range(20):
            files.write(descriptor, b"%d" % (at % 10))
        files.close(descriptor)
    found = [tree["new"] for tree in disk.states(len(disk.history), 100, random.Random(0))]
    assert 20 < len(found) <= 150
    assert b"0123456789" * 2 in found
    assert b"" in found
    assert all(tree["old"] == b"old" for tree in disk.states(len(disk.history), 100, random.Random(0)))
