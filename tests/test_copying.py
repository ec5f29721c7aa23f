"""Copies of a spool that is being written: each is a valid prefix, or says exactly what to fetch, and is one once that is there.

The writer logs, begins new journals, seals and removes as fast as sealing keeps up, while `cp`, `rsync` and `tar` copy it
in a loop. What a record must hold is known from its seq alone.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from journals import begin_small, fill_journals, logged, seal_small, whole_rows, writer_folder

import spool
from spool.cli import main
from spool.journal import Damage
from spool.reader import RunReader

WRITER = """
import os, sys, time, spool
from spool import seal, writer
writer.SEAL_BYTES, seal.KEEP_SEALED_S, writer.SYNC_EACH_S = int(sys.argv[2]), 0, 0.01
run = spool.init(project="p", dir=sys.argv[1], run_id="r", durability="os")
workers = int(sys.argv[3])
parent = os.getppid()
for _ in range(workers):
    begun_by = os.getpid()
    if os.fork() == 0:
        parent = begun_by
        break
is_first = True
while os.getppid() == parent:
    seq = run._writer.seq + 1 if run._writer else 1
    if seq % 3 == 1:
        run.log({"a": seq / 7, "text": str(seq) * (seq % 20)}, step=seq)
    elif seq % 3 == 2:
        run.log_generations(step=seq, rows=[{"input": str(seq), "output": "x" * (seq % 300)}])
    else:
        run.tag(at=seq)
    if is_first:
        is_first = False
        os.write(1, b"writes\\n")
    while len(run._writer._sealer._waiting) > 2:
        time.sleep(0.001)
os._exit(0)
"""


@contextmanager
def writing(folder: Path, seal_bytes: int, forks: int = 1) -> Iterator["subprocess.Popen[bytes]"]:
    """A lead writer and forked ones, in a process group of their own."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(seal_bytes), str(forks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(1 + forks):
            assert child.stdout.readline() == b"writes\n"
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def needs(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"no {command} here")
    return found


def copy(tool: str, source: Path, target: Path) -> int:
    """Returns the exit code: each of the tools complains when a file vanishes, and copies the rest."""
    target.mkdir(parents=True, exist_ok=True)
    if tool == "cp":
        commands = [[needs("cp"), "-r", f"{source}/.", str(target)]]
    elif tool == "rsync":
        commands = [[needs("rsync"), "-a", f"{source}/", f"{target}/"]]
    else:
        archive = target.with_suffix(".tar")
        commands = [
            [needs("tar"), "-C", str(source), "-cf", str(archive), "."],
            [needs("tar"), "-C", str(target), "-xf", str(archive)],
        ]
    codes = [subprocess.run(command, capture_output=True, check=False).returncode for command in commands]
    target.with_suffix(".tar").unlink(missing_ok=True)
    return max(codes)


def expected(seq: int) -> tuple[str, tuple[object, ...]]:
    """(table, cells) of a record, from its seq."""
    if seq % 3 == 1:
        return "metrics", (("a", seq / 7, None), ("text", None, str(seq) * (seq % 20)))
    if seq % 3 == 2:
        return "generations", ((str(seq), "x" * (seq % 300)),)
    return "events", (("tag", f'{{"at":{seq}}}'),)


CELLS = {"metrics": ("key", "value", "exact"), "generations": ("input", "output"), "events": ("kind", "body")}


def records_of(run: RunReader) -> dict[str, dict[int, tuple[str, tuple[object, ...]]]]:
    """By writer and seq, in order of delivery; fails where a record comes twice or out of order."""
    found = {}
    for writer in run.writers():
        mine: dict[int, list[tuple[str, tuple[object, ...]]]] = {}
        for table, names in CELLS.items():
            seqs: list[int] = []
            for batch in writer.batches(table):
                seqs += batch["seq"].to_pylist()
                columns = [batch[name].to_pylist() for name in names]
                for seq, *cells in zip(batch["seq"].to_pylist(), *columns, strict=True):
                    mine.setdefault(seq, []).append((table, tuple(cells)))
            assert seqs == sorted(seqs)
        found[writer.id] = {seq: (rows[0][0], tuple(cells for _, cells in rows)) for seq, rows in mine.items()}
        assert all(len({table for table, _ in rows}) == 1 for rows in mine.values())
    return found


def check_copy(target: Path) -> list[Damage]:
    """What is there is right, each record once; what is missing before the last one of a writer is to be fetched."""
    run = spool.open(target).run("r")
    damage = run.damage()
    assert [one for one in damage if one.fetch is None] == [], "a copy has no corruption"
    for writer, records in records_of(run).items():
        is_lead = min(records, default=0) == 1 and records[1][0] == "events"
        wrong = [seq for seq, found in records.items() if found != expected(seq) and not (is_lead and seq == 1)]
        assert wrong == []
        missing = set(range(1, max(records, default=0) + 1)) - set(records)
        named = [one for one in damage if f"/{writer}" in str(one.fetch)]
        unnamed = [seq for seq in missing if not any(one.first_seq <= seq <= one.last_seq for one in named)]
        assert unnamed == []
    check_verify(target, damage)
    return damage


def check_verify(target: Path, damage: list[Damage]) -> None:
    done = CliRunner().invoke(main, ["verify", str(target)])
    assert done.exit_code == (3 if damage else 0)
    for one in damage:
        assert f"incomplete copy: fetch {one.fetch}: " in done.stdout


def fetch(source: Path, target: Path, damage: list[Damage]) -> None:
    """Bring exactly what was named, as a person does: `cp -r` of that path, or of what it was sealed into meanwhile."""
    for name in {name for one in damage for name in each(str(one.fetch))}:
        path = source / name
        if path.suffix == ".jsonl" and not path.exists():
            path = path.with_suffix("")  # sealed and removed since
        if path.suffix == "" and not path.exists():
            path = path.with_suffix(".jsonl")  # not sealed yet
        if path.is_dir():
            shutil.copytree(path, target / path.relative_to(source), dirs_exist_ok=True)
        else:
            (target / name).parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # sealed and removed just now: it is named again
                shutil.copy2(path, target / path.relative_to(source))


def each(name: str) -> list[str]:
    """`run/writer/{000002..000004}` means all three, to a person and to a shell."""
    return subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {name}"], capture_output=True, text=True, check=True
    ).stdout.split()


def check_becomes_whole(source: Path, target: Path) -> int:
    """Fetch what is named until nothing is; returns how often that was needed."""
    rounds = 0
    while damage := check_copy(target):
        rounds += 1
        assert rounds <= 5, damage
        fetch(source, target, damage)
    for records in records_of(spool.open(target).run("r")).values():
        assert sorted(records) == list(range(1, len(records) + 1))
    return rounds


def check_copies(tool: str, folder: Path, count: int, seal_bytes: int) -> None:
    """Copy at least `count` times, and until journals have been sealed and removed meanwhile."""
    needs(tool)
    source = folder / "s"
    made = 0
    with writing(source, seal_bytes):
        while made < count or not list(source.glob("r/*/000003")) or list(source.glob("r/*/000001.jsonl")):
            target = folder / f"copy{made}"
            copy(tool, source, target)
            check_becomes_whole(source, target)
            shutil.rmtree(target)
            made += 1


TOOLS = ("cp", "rsync", "tar")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_copy_of_a_spool_that_is_being_written_and_sealed_is_a_valid_prefix(tmp_path, tool):
    check_copies(tool, tmp_path, count=3, seal_bytes=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("seal_bytes", [2_000, 30_000, 200_000])
@pytest.mark.parametrize("tool", TOOLS)
def test_every_copy_of_a_spool_that_is_being_written_and_sealed_is_a_valid_prefix(tmp_path, tool, seal_bytes):
    check_copies(tool, tmp_path, count=10, seal_bytes=seal_bytes)


# --- the moments that a copy can meet, one by one


JOURNALS, CALLS = 4, 4


@pytest.fixture
def source(tmp_path):
    """Four journals of one writer, none sealed; a copy of it is in `copy`."""
    run = begin_small(tmp_path / "s", "r")
    fill_journals(run, journals=JOURNALS, calls=CALLS)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    return writer_folder(run)


def check_fetched(source: Path, copied: Path, fetch_exactly: set[str], seqs: set[int]) -> None:
    """What is to be fetched is named, with the seqs that are missing; what is there is right; and then all is there."""
    whole = logged(spool.open(source.parent.parent).run("r")).rows
    run = spool.open(copied).run("r")
    damage = run.damage()
    assert {one.fetch for one in damage} == fetch_exactly
    assert {seq for one in damage for seq in range(one.first_seq, one.last_seq + 1)} == seqs
    (found,) = whole_rows(run).values()
    for table, rows in whole[source.name].items():
        assert found[table] == [row for row in rows if row[0] not in seqs]
    check_verify(copied, damage)
    fetch(source.parent.parent, copied, damage)
    again = spool.open(copied).run("r")
    assert (whole_rows(again), again.damage()) == (whole, [])
    check_verify(copied, [])


def test_a_journal_copied_while_it_grew_and_followed_by_the_next_is_to_be_fetched_at_every_byte(tmp_path, source):
    name = f"r/{source.name}/000002.jsonl"
    content = (source / "000002.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    ends = [len(b"".join(lines[: at + 1])) for at in range(len(lines))]
    for length in [
        *range(0, len(content), 61),
        *(end + off for end in ends for off in (-1, 0, 1) if end + off < len(content)),
    ]:
        (tmp_path / "copy" / name).write_bytes(content[:length])
        missing = {CALLS + at for at, end in enumerate(ends) if at and end > length}
        check_fetched(source, tmp_path / "copy", {name}, missing)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_journal_that_was_removed_before_it_was_copied_is_to_be_fetched_as_its_segment(tmp_path, source, sealed):
    """The list of names was made before the segment was there, and read after the journal was gone."""
    (tmp_path / "copy" / "r" / source.name / "000002.jsonl").unlink()
    if sealed:
        seal_small(source, 2)
    check_fetched(source, tmp_path / "copy", {f"r/{source.name}/000002"}, set(range(CALLS + 1, 2 * CALLS + 1)))


def test_several_that_are_absent_in_a_row_are_all_named(tmp_path, source):
    for number in (2, 3):
        (tmp_path / "copy" / "r" / source.name / f"00000{number}.jsonl").unlink()
    wanted = {f"r/{source.name}/{{000002..000003}}"}
    check_fetched(source, tmp_path / "copy", wanted, set(range(CALLS + 1, 3 * CALLS + 1)))


def test_what_is_absent_in_two_places_is_named_in_both(tmp_path, source):
    for number in (1, 3):
        (tmp_path / "copy" / "r" / source.name / f"00000{number}.jsonl").unlink()
    seqs = {*range(1, CALLS + 1), *range(2 * CALLS + 1, 3 * CALLS + 1)}
    check_fetched(source, tmp_path / "copy", {f"r/{source.name}/000001", f"r/{source.name}/000003"}, seqs)


def test_unfinished_work_that_was_copied_is_not_read(tmp_path, source):
    half = tmp_path / "copy" / "r" / source.name / ".000001.x1y2z3"
    half.mkdir()
    (half / "metrics.parquet.part").write_bytes(b"PAR1half")
    check_fetched(source, tmp_path / "copy", set(), set())


def test_journal_and_segment_of_one_number_in_a_copy_are_read_once(tmp_path, source):
    seal_small(source, 1, keep_journal=True)
    shutil.copytree(source / "000001", tmp_path / "copy" / "r" / source.name / "000001")
    check_fetched(source, tmp_path / "copy", set(), set())
    journal = tmp_path / "copy" / "r" / source.name / "000001.jsonl"
    journal.write_bytes(journal.read_bytes()[:300])
    check_fetched(source, tmp_path / "copy", set(), set())
