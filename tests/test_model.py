"""Any sequence of log, rotate, seal, crash, resume, copy and read agrees with a list in memory."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from journals import begin_without_thread, reader

from spool import seal

SMALL = settings(max_examples=7, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))


class SpoolMachine(RuleBasedStateMachine):
    """The model: the values logged by each attempt, in order. A crash leaves the writer behind, unclosed, with its folder."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.run = begin_without_thread(self.folder, run_id="r", durability="os")
        self.attempts: list[list[float]] = [[]]
        self.copies = 0

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
        self.run = begin_without_thread(self.folder, run_id="r", resume=True, durability="os")
        self.attempts.append([])

    @rule()
    def go_on_with_a_copy(self) -> None:
        self.copies += 1
        copy = self.folder / f"copy{self.copies}"
        shutil.copytree(self.run.path.parent, copy / "spool")
        self.folder = copy
        self.run = begin_without_thread(self.folder, run_id="r", resume=True, durability="os")
        self.attempts.append([])

    @invariant()
    def what_is_read_is_what_was_logged(self) -> None:
        found = reader(self.run)
        assert found.metrics()["value"].to_pylist() == [value for values in self.attempts for value in values]
        assert found.damage() == []
        assert [one.number for one in found.attempts()] == list(range(1, len(self.attempts) + 1))
        for writer in found.writers():
            seqs = {
                seq for name in ("metrics", "events") for one in writer.batches(name) for seq in one["seq"].to_pylist()
            }
            assert seqs == set(range(1, writer.last_seq + 1))


def test_the_spool_agrees_with_the_model():
    run_state_machine_as_test(SpoolMachine, settings=SMALL)


@pytest.mark.slow
def test_the_spool_agrees_with_the_model_for_longer():
    run_state_machine_as_test(SpoolMachine, settings=settings(SMALL, max_examples=300, stateful_step_count=40))
