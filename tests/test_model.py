"""Any sequence of log, rotate, seal, crash, resume, finish, compact, gc, copy, damage and read agrees with a list in memory."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from journals import begin_without_thread, reader

import spool
from spool import compact, cursor, format, layout, removal, seal
from spool.catalog import RunFolder
from spool.reader import RunReader

SMALL = settings(max_examples=7, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))


class SpoolMachine(RuleBasedStateMachine):
    """The model: the values logged by each attempt, in order. A crash leaves the writer behind, unclosed, with its folder."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.run = begin_without_thread(self.folder, run_id="r", durability="os")
        self.attempts: list[list[float]] = [[]]
        self.copies = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    def resume(self) -> None:
        self.run = begin_without_thread(self.folder, run_id="r", resume=True, durability="os")
        self.attempts.append([])

    def copy(self) -> Path:
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        shutil.copytree(self.run.path.parent, copy / "spool")
        return copy

    @rule(values=st.lists(st.floats(allow_nan=False), max_size=5), step=st.none() | st.integers(-3, 3))
    def log(self, values: list[float], step: int | None) -> None:
        for value in values:
            self.run.log({"a": value}, step=step)
            self.attempts[-1].append(value)

    @rule()
    def rotate(self) -> None:
        self.run._writer._rotate()

    @rule(pick=st.integers(0, 5))
    def seal(self, pick: int) -> None:
        journals = sorted(self.run.path.glob("*/*.jsonl"))
        live = self.run._writer.path
        for journal in [path for path in journals if path != live][pick : pick + 1]:
            seal.seal(journal)

    @rule()
    def remove_sealed(self) -> None:
        for journal in self.run.path.glob("*/*.jsonl"):
            if journal != self.run._writer.path:
                seal.remove_sealed(journal)

    @rule(torn=st.binary(max_size=20).filter(lambda tail: b"\n" not in tail))
    def crash_and_resume(self, torn: bytes) -> None:
        with self.run._writer.path.open("ab") as journal:
            journal.write(torn)
        self.resume()

    @rule(status=st.sampled_from(["finished", "preempted", "failed"]))
    def finish_and_resume(self, status: str) -> None:
        self.run.finish(status)
        assert RunFolder(self.run.path).status().state == status
        self.resume()

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.folder = self.copy()
        self.resume()

    @rule()
    def finish_compact_and_go_on_there(self) -> None:
        self.run.finish()
        self.copies += 1
        target = self.folder / f"copy{self.copies}"
        compact.compact(RunFolder(self.run.path), target / "spool", lambda _: None)
        self.check(spool.open(target / "spool").run("r"))
        self.folder = target
        self.resume()

    @rule(is_delivered=st.booleans())
    def remove_another_run_that_was_delivered(self, is_delivered: bool) -> None:
        self.copies += 1
        other = begin_without_thread(self.folder, run_id=f"other{self.copies}", durability="os", role="lead")
        other.log({"a": 1.0})
        other.finish()
        state = self.run.path.parent / format.STATE_FOLDER
        seqs = {one.path.name: dict.fromkeys(format.TABLES, one.last.seq) for one in layout.glance(other.path)}
        if is_delivered:
            cursor.Cursor(state / "mlflow" / "x.json", "MLflow", "x", other.id, seqs, status="finished").save()
        conditions = removal.Conditions(("mlflow",), state, ended_before_ns=2**63 - 1)
        verdict = removal.judge(RunFolder(other.path), conditions)
        assert bool(verdict.why) != is_delivered, verdict.why
        if is_delivered:
            removal.remove(verdict, conditions)
        assert other.path.exists() != is_delivered
        shutil.rmtree(other.path, ignore_errors=True)

    @rule(pick=st.integers(0, 2**30), bit=st.integers(0, 7))
    def damage_a_copy(self, pick: int, bit: int) -> None:
        """One flipped bit: nothing wrong is delivered, nothing is delivered twice, and what is not delivered is reported."""
        copy = self.copy() / "spool"
        paths = [path for path in sorted((copy / "r").rglob("*")) if path.is_file() and not path.name.startswith(".")]
        sizes = [path.stat().st_size for path in paths]
        pick %= sum(sizes)
        while pick >= sizes[0]:
            pick -= sizes.pop(0)
            paths.pop(0)
        content = bytearray(paths[0].read_bytes())
        content[pick] ^= 1 << bit
        paths[0].write_bytes(content)
        run = spool.open(copy).run("r")
        found = {writer.id: values(writer) for writer in run.writers()}
        missing = 0
        for writer in reader(self.run).writers():
            logged, there = values(writer), iter(found.get(writer.id, []))
            left = [next(there, None)]
            for value in logged:
                if repr(left[0]) == repr(value):
                    left[0] = next(there, None)
                else:
                    missing += 1
            assert left == [None], "a value that was not logged, or not in this order"
        is_torn_tail = paths[0].suffix == ".jsonl" and pick == len(content) - 1
        assert run.damage() or (missing == 0 and is_torn_tail) or is_in_torn_tail(paths[0], pick)

    def check(self, run: RunReader) -> None:
        assert run.metrics()["value"].to_pylist() == [value for values in self.attempts for value in values]
        assert run.damage() == []
        assert [one.number for one in run.attempts()] == list(range(1, len(self.attempts) + 1))
        for writer in run.writers():
            seqs = {
                seq for name in ("metrics", "events") for one in writer.batches(name) for seq in one["seq"].to_pylist()
            }
            assert seqs == set(range(1, writer.last_seq + 1))

    @invariant()
    def what_is_read_is_what_was_logged(self) -> None:
        self.check(reader(self.run))


def values(writer: spool.reader.WriterReader) -> list[float]:
    return [value for batch in writer.batches("metrics") for value in batch["value"].to_pylist()]


def is_in_torn_tail(path: Path, at: int) -> bool:
    """What a killed process left of a record counts for nothing, whole or not."""
    return path.suffix == ".jsonl" and at > path.read_bytes().rfind(b"\n")


def test_the_spool_agrees_with_the_model():
    run_state_machine_as_test(SpoolMachine, settings=SMALL)


@pytest.mark.slow
def test_the_spool_agrees_with_the_model_for_longer():
    run_state_machine_as_test(SpoolMachine, settings=settings(SMALL, max_examples=300, stateful_step_count=40))
