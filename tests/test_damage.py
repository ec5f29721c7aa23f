"""Damage of every kind, everywhere: nothing wrong is delivered as good, what is undamaged is delivered, the rest is reported.

Each test changes one spool in one way, reads it whole, and compares with what was logged. A sample runs by default, every
byte and every bit with `-m slow`.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from click.testing import CliRunner
from journals import (
    Logged,
    begin_small,
    covered,
    fill_journals,
    logged,
    seal_small,
    whole_rows,
    without_thread,
    writer_folder,
)

import spool
from spool import format
from spool.cli import main
from spool.journal import Damage

Place = tuple[str, str, int]
"""(writer, table, seq)."""


@dataclass
class World:
    """A run, intact, and files of others to put into it."""

    run: Logged
    writer: str
    others: dict[str, Logged] = field(default_factory=dict)

    def places(self, number: int, seqs: Iterable[int] | None = None) -> set[Place]:
        """The records of one journal or segment of the lead writer."""
        wanted = set(range(1 + (number - 1) * CALLS, 1 + number * CALLS)) if seqs is None else set(seqs)
        return {
            (self.writer, table, seq)
            for table, rows in self.run.rows[self.writer].items()
            for seq, _ in rows
            if seq in wanted
        }


CALLS, JOURNALS = 4, 3
ATTEMPT = re.compile(r"^(\('[^']*', '[^']*', )'[^']*'")
"""The third column of a row as text; without any header nobody knows it."""


@pytest.fixture
def world(tmp_path):
    """Three journals of a writer, none of them sealed."""
    run = begin_small(tmp_path / "s", "run-1")
    fill_journals(run, journals=JOURNALS, calls=CALLS)
    return World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(run).name)


@pytest.fixture(params=["journals gone", "journals kept"])
def sealed(request, tmp_path):
    """Two segments, with and without their journals, and a live journal."""
    return sealed_world(tmp_path, keep_journals=request.param == "journals kept")


def sealed_world(tmp_path, *, keep_journals: bool) -> World:
    run = begin_small(tmp_path / "s", "run-1")
    fill_journals(run, journals=JOURNALS, calls=CALLS)
    for number in (1, 2):
        seal_small(writer_folder(run), number, keep_journal=keep_journals)
    return World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(run).name)


def check(run: Logged, *, may_lack: Iterable[Place] = (), silent: Iterable[Place] = ()) -> list[Damage]:
    """Read everything and compare with what was logged; returns what was reported.

    `may_lack`: records that the damage has touched. `silent`: those among them that may be missing without a report, which
    only a torn tail explains.
    """
    reader = spool.open(run.path.parent).run(run.path.name)
    found = whole_rows(reader)
    damage = reader.damage()
    assert set(found) <= set(run.rows), "rows of a writer that does not exist"
    missing: set[Place] = set()
    without_header = {writer.id for writer in reader.writers() if writer.attempt == "unknown"}
    assert damage or not without_header
    for writer, tables in run.rows.items():
        for table, rows in tables.items():
            if writer in without_header:
                rows = [(seq, ATTEMPT.sub(r"\1'unknown'", row)) for seq, row in rows]
            delivered = found.get(writer, {}).get(table, [])
            seqs = {seq for seq, _ in delivered}
            assert delivered == [row for row in rows if row[0] in seqs], "each as logged, once, in order"
            missing |= {(writer, table, seq) for seq, _ in rows if seq not in seqs}
    assert missing <= set(may_lack), "an undamaged record is not delivered"
    unreported = {
        (writer, table, seq)
        for writer, table, seq in missing
        if not any(seq in seqs for seqs in covered(damage, run.path / writer))
    }
    assert unreported <= set(silent), "missing, and not reported"
    check_verify(run, damage)
    return damage


def check_verify(run: Logged, damage: list[Damage]) -> None:
    done = CliRunner().invoke(main, ["verify", str(run.path.parent), "--run", run.path.name])
    assert isinstance(done.exception, SystemExit | None), done.exception
    assert done.exit_code == (3 if damage else 0)
    for one in damage:
        assert one.path.startswith(str(run.path))
        (line,) = {line for line in done.stdout.splitlines() if line == f"  {one}"}
        if one.fetch is None:
            assert f"{one.path}: {one.reason} at byte {one.offset}, {one.length} bytes" in line
        else:
            assert f"incomplete copy: fetch {one.fetch}: " in line
        if one.first_seq is not None:
            assert f"seq {one.first_seq}" in line
            assert one.first_seq == one.last_seq or f"to {one.last_seq or 'unknown'}" in line


def named_at(damage: list[Damage], path: object, start: int, end: int) -> bool:
    """Whether the reports cover the bytes [start, end) of a file."""
    ranges = [range(one.offset, one.offset + one.length) for one in damage if one.path == str(path)]
    return all(any(at in one for one in ranges) for at in range(start, end))


def positions(size: int, count: int, seed: object, always: Iterable[int] = ()) -> list[int]:
    """A seeded sample of a file's bytes, with its ends and some that must not be left out."""
    sample = random.Random(str(seed)).sample(range(size), min(size, count))
    return sorted({0, size - 1, *sample, *(at for at in always if 0 <= at < size)})


def line_starts(content: bytes) -> list[int]:
    starts = [0]
    for line in content.splitlines(keepends=True)[:-1]:
        starts.append(starts[-1] + len(line))
    return starts


def touched(content: bytes, start: int, end: int) -> list[int]:
    """Seqs of the lines that bytes [start, end) belong to; a line is intact without its newline."""
    found = []
    for at, line in zip(line_starts(content), content.splitlines(), strict=True):
        seq = format.seq_of_line(line)
        if seq is not None and at < end and start < at + len(line):
            found.append(seq)
    return found


def cut_lines(content: bytes, length: int) -> list[int]:
    """Seqs of the lines that do not end, with their newline, before byte `length`."""
    lines = content.splitlines(keepends=True)
    seqs = [format.seq_of_line(line.removesuffix(b"\n")) for line in lines]
    ends = [start + len(line) for start, line in zip(line_starts(content), lines, strict=True)]
    return [seq for seq, end in zip(seqs, ends, strict=True) if seq is not None and end > length]


def journals_of(world: World) -> Iterator[tuple[int, str, bytes]]:
    for number in range(1, JOURNALS + 1):
        name = f"{world.writer}/{format.journal_name(number)}"
        if name in world.run.contents:
            yield number, name, world.run.contents[name]


def flip(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


# --- journals


def check_cut(world: World, number: int, name: str, length: int) -> None:
    content = world.run.contents[name]
    places = world.places(number, cut_lines(content, length))
    is_last = number == JOURNALS
    with world.run.changed({name: content[:length]}):
        damage = check(world.run, may_lack=places, silent=places if is_last else ())
        assert bool(damage) != is_last, "a torn tail is no damage, anything else is"
        for one in damage:
            assert one.fetch in (None, f"run-1/{name}")


def test_a_journal_cut_at_a_byte_is_a_torn_tail_when_it_is_the_last_and_reported_otherwise(world):
    for number, name, content in journals_of(world):
        edges = [at + off for at in line_starts(content) for off in (-1, 0, 1)]
        for length in positions(len(content), 40, name.split("/")[1], edges):
            check_cut(world, number, name, length)


@pytest.mark.slow
def test_a_journal_cut_at_every_byte_is_a_torn_tail_when_it_is_the_last_and_reported_otherwise(world):
    for number, name, content in journals_of(world):
        for length in range(len(content)):
            check_cut(world, number, name, length)


def check_flip(world: World, number: int, name: str, at: int, bit: int) -> None:
    content = world.run.contents[name]
    with world.run.changed({name: flip(content, at, bit)}):
        damage = check(world.run, may_lack=world.places(number, touched(content, at, at + 1)))
        assert named_at(damage, world.run.path / name, at, at + 1)
        assert {one.fetch for one in damage} == {None}, "bytes that are there and wrong are no incomplete copy"


def test_a_flipped_bit_of_a_journal_costs_its_line_and_is_named(world):
    for number, name, content in journals_of(world):
        edges = [at + off for at in line_starts(content) for off in (-1, 0)]
        for at in positions(len(content), 60, name.split("/")[1], edges):
            check_flip(world, number, name, at, random.Random(at).randrange(8))


@pytest.mark.slow
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_a_journal_costs_its_line_and_is_named(world, bit):
    for number, name, content in journals_of(world):
        if number > 1:  # the first is no other case than the second
            for at in range(len(content)):
                check_flip(world, number, name, at, bit)


def check_hole(world: World, number: int, name: str, start: int, end: int) -> None:
    content = world.run.contents[name]
    with world.run.changed({name: content[:start] + bytes(end - start) + content[end:]}):
        places = world.places(number, touched(content, start, end))
        if end == len(content):  # as if cut: without any newline after it no record is complete
            places |= world.places(number, cut_lines(content, start))
        is_open_end = number == JOURNALS and end == len(content)  # zeros there may not yet be visible
        damage = check(world.run, may_lack=places, silent=places if is_open_end else ())
        assert is_open_end or named_at(damage, world.run.path / name, start, end)


def holes(content: bytes, count: int, seed: object) -> Iterator[tuple[int, int]]:
    chance = random.Random(str(seed))
    edges = [at + off for at in line_starts(content) for off in (-1, 0, 1)] + [len(content)]
    edges = [at for at in edges if at >= 0]
    for at in range(count):
        ends = [chance.choice(edges) if chance.random() < 0.4 else chance.randrange(len(content) + 1) for _ in "ab"]
        start, end = sorted(ends)
        if start < end:
            yield start, min(end, start + chance.choice([1, 16, 512, 4096])) if at % 2 else end


def test_a_hole_of_zeros_costs_the_lines_it_touches_and_is_named(world):
    for number, name, content in journals_of(world):
        for start, end in holes(content, 60, number):
            check_hole(world, number, name, start, end)


@pytest.mark.slow
def test_any_hole_of_zeros_costs_the_lines_it_touches_and_is_named(world):
    for number, name, content in journals_of(world):
        for start, end in holes(content, 1000, -number):
            check_hole(world, number, name, start, end)


def test_any_two_lines_swapped_are_damage_and_every_record_comes_once_in_order(world):
    for _, name, content in journals_of(world):
        lines = content.splitlines(keepends=True)
        for one, two in combinations(range(len(lines)), 2):
            swapped = list(lines)
            swapped[one], swapped[two] = swapped[two], swapped[one]
            with world.run.changed({name: b"".join(swapped)}):
                damage = check(world.run)
                assert {one.path for one in damage} == {str(world.run.path / name)}


def test_any_line_repeated_anywhere_is_damage_and_every_record_comes_once_in_order(world):
    for _, name, content in journals_of(world):
        lines = content.splitlines(keepends=True)
        for line in lines:
            for at in range(len(lines) + 1):
                with world.run.changed({name: b"".join([*lines[:at], line, *lines[at:]])}):
                    damage = check(world.run)
                    assert {one.path for one in damage} == {str(world.run.path / name)}


def test_any_line_left_out_is_damage_named_by_its_seq_unless_it_is_the_end_of_the_last_journal(world):
    for number, name, content in journals_of(world):
        lines = content.splitlines(keepends=True)
        for at, line in enumerate(lines):
            seq = format.seq_of_line(line.removesuffix(b"\n"))
            places = world.places(number, [seq] if seq else [])
            is_tail = number == JOURNALS and at == len(lines) - 1
            with world.run.changed({name: b"".join([*lines[:at], *lines[at + 1 :]])}):
                damage = check(world.run, may_lack=places, silent=places if is_tail else ())
                assert bool(damage) != is_tail


def of_other_records(tmp_path) -> World:
    """A record whose inputs are the whole records, checksums too, that another agent has read from a journal."""
    run = begin_small(tmp_path / "s", "run-1")
    fill_journals(run, journals=1, calls=CALLS)
    *_, one, two = (writer_folder(run) / "000001.jsonl").read_bytes().splitlines()
    later = format.record_line(9, 1, 1, None, format.fast_metrics({"never logged": 1.0})).removesuffix(b"\n")
    inside = [format.decode(line) for line in (one, later, two, later)]
    run.span("reads", step=1, inputs=inside).start()
    run.log({"after": 1.0}, step=2)
    return World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(run).name)


def test_records_inside_a_record_are_never_taken_for_records(tmp_path):
    world = of_other_records(tmp_path)
    name = f"{world.writer}/000001.jsonl"
    content = world.run.contents[name]
    start, end = line_starts(content)[-2:]
    places = places_of(world.run, world.writer, touched(content, start, end))
    for at in range(start, end - 1, 7):
        with world.run.changed({name: flip(content, at, at % 8)}):
            assert check(world.run, may_lack=places)
    edges = [start + match.end() + more for match in re.finditer(rb'"}', content[start:end]) for more in (0, 1, 9)]
    for at in sorted({*range(start, end, 11), *(at for at in edges if at < end)}):
        with world.run.changed({name: content[:at]}):
            tail = places | places_of(world.run, world.writer, cut_lines(content, at))
            assert check(world.run, may_lack=tail, silent=tail) == []
    with world.run.changed({name: flip(content, end - 1, 3)}):
        check(world.run)


# --- segments


def parts_of(world: World) -> Iterator[tuple[int, str, bytes]]:
    """(number, name, content) of every file of the segments."""
    for name, content in sorted(world.run.contents.items()):
        if name.endswith((".parquet", format.MANIFEST_FILE)):
            yield int(name.split("/")[1]), name, content


def touched_by_file(world: World, number: int, name: str) -> set[Place]:
    """What a damaged file of a segment can cost: its table, all tables with the manifest, nothing beside its journal."""
    if f"{world.writer}/{format.journal_name(number)}" in world.run.contents:
        return set()
    table = name.rsplit("/", 1)[1].removesuffix(".parquet")
    return {place for place in world.places(number) if table in (place[1], format.MANIFEST_FILE)}


def check_part(world: World, number: int, name: str, content: bytes | None) -> None:
    """One file of a segment with other bytes, or gone."""
    with world.run.changed({name: content}):
        damage = check(world.run, may_lack=touched_by_file(world, number, name))
        path = world.run.path / name
        assert str(path) in {one.path for one in damage}
        if content is None:
            folder = name.rsplit("/", 1)[0]
            assert {one.fetch for one in damage} <= {f"run-1/{name}", f"run-1/{folder}"}
        else:
            assert {one.fetch for one in damage} == {None}
            assert named_at(damage, path, 0, min(len(content), len(world.run.contents[name])))


def sampled_parts(world: World, count: int) -> Iterator[tuple[int, str, bytes, int]]:
    for number, name, content in parts_of(world):
        for at in positions(len(content), count, name.split("/", 1)[1], [4, len(content) - 4]):
            yield number, name, content, at


def is_last_newline(name: str, content: bytes, length: int) -> bool:
    """Nothing is missing then: a manifest proves itself without its newline."""
    return name.endswith(format.MANIFEST_FILE) and length == len(content) - 1


def test_a_file_of_a_segment_cut_at_a_byte_costs_its_rows_and_is_named(sealed):
    for number, name, content, length in sampled_parts(sealed, 6):
        if not is_last_newline(name, content, length):
            check_part(sealed, number, name, content[:length])


@pytest.mark.slow
@pytest.mark.parametrize("file", ["manifest.json", "metrics.parquet"])
def test_a_file_of_a_segment_cut_at_every_byte_costs_its_rows_and_is_named(tmp_path, file):
    world = sealed_world(tmp_path, keep_journals=False)
    name = f"{world.writer}/000002/{file}"
    content = world.run.contents[name]
    for length in range(len(content)):
        if not is_last_newline(name, content, length):
            check_part(world, 2, name, content[:length])


def test_a_flipped_bit_of_a_segment_costs_the_rows_of_its_file_and_is_named(sealed):
    for number, name, content, at in sampled_parts(sealed, 6):
        check_part(sealed, number, name, flip(content, at, random.Random(at).randrange(8)))


@pytest.mark.slow
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_a_manifest_is_found(tmp_path, bit):
    world = sealed_world(tmp_path, keep_journals=False)
    name = f"{world.writer}/000002/{format.MANIFEST_FILE}"
    for at in range(len(world.run.contents[name])):
        check_part(world, 2, name, flip(world.run.contents[name], at, bit))


@pytest.mark.slow
@pytest.mark.parametrize("table", format.TABLES)
def test_every_byte_of_a_parquet_file_with_a_flipped_bit_is_found(tmp_path, table):
    world = sealed_world(tmp_path, keep_journals=False)
    name = f"{world.writer}/000002/{table}.parquet"
    for at in range(len(world.run.contents[name])):
        check_part(world, 2, name, flip(world.run.contents[name], at, random.Random(at).randrange(8)))


def test_a_hole_of_zeros_in_a_file_of_a_segment_is_found(sealed):
    for number, name, content in parts_of(sealed):
        for start, end in holes(content, 4, name.split("/", 1)[1]):
            damaged = content[:start] + bytes(end - start) + content[end:]
            if damaged != content:
                check_part(sealed, number, name, damaged)


def test_a_file_of_a_segment_that_is_not_there_is_to_be_fetched(sealed):
    for number, name, _ in parts_of(sealed):
        check_part(sealed, number, name, None)


def test_two_files_of_a_segment_exchanged_are_found(sealed):
    for number in (1, 2):
        folder = f"{sealed.writer}/{format.segment_name(number)}"
        one, two = f"{folder}/metrics.parquet", f"{folder}/events.parquet"
        changes = {one: sealed.run.contents[two], two: sealed.run.contents[one]}
        places = touched_by_file(sealed, number, one) | touched_by_file(sealed, number, two)
        with sealed.run.changed(changes):
            damage = check(sealed.run, may_lack=places)
            assert {one.path for one in damage} == {str(sealed.run.path / name) for name in changes}


def test_a_damaged_journal_beside_its_segment_costs_nothing(tmp_path):
    world = sealed_world(tmp_path, keep_journals=True)
    for number, name, content in list(journals_of(world))[:-1]:
        for at in positions(len(content), 8, number):
            for damaged in (flip(content, at, at % 8), content[:at], content + content[:at], b""):
                with world.run.changed({name: damaged}):
                    check(world.run)


def test_a_damaged_manifest_before_a_journal_that_has_just_begun_is_reported_with_its_first_seq(tmp_path):
    world = sealed_world(tmp_path, keep_journals=False)
    manifest = f"{world.writer}/000002/{format.MANIFEST_FILE}"
    journal = f"{world.writer}/000003.jsonl"
    places = world.places(2) | world.places(3)
    for left in (b"", world.run.contents[journal][:50]):
        with world.run.changed({manifest: b"{}", journal: left}):
            assert check(world.run, may_lack=places, silent=world.places(3))


def test_a_journal_cut_before_one_that_has_just_begun_is_reported_with_the_first_seq_that_is_missing(world):
    name, last = (f"{world.writer}/00000{number}.jsonl" for number in (2, 3))
    content = world.run.contents[name]
    for length in (line_starts(content)[-1] + 9, len(content) - 1):
        places = world.places(2, cut_lines(content, length))
        for left in (b"", world.run.contents[last][:50]):
            with world.run.changed({name: content[:length], last: left}):
                assert check(world.run, may_lack=places | world.places(3), silent=world.places(3))


def test_a_damaged_segment_whose_journal_goes_on_delivers_each_record_once(tmp_path):
    run = begin_small(tmp_path / "s", "run-1")
    fill_journals(run, journals=1, calls=CALLS)
    seal_small(writer_folder(run), 1, keep_journal=True)
    fill_journals(run, journals=1, calls=CALLS, label="later")
    world = World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(run).name)
    assert len(world.run.seqs(world.writer)) == 2 * CALLS
    for number, name, content in parts_of(world):
        for damaged in (flip(content, len(content) // 2, 0), content[:9], None):
            check_part(world, number, name, damaged)


# --- whole journals, segments, writers


def test_a_segment_that_was_deleted_is_to_be_fetched_unless_its_journal_is_there(sealed):
    for number in (1, 2):
        folder = f"{sealed.writer}/{format.segment_name(number)}"
        has_journal = f"{folder}.jsonl" in sealed.run.contents
        with sealed.run.changed({f"{folder}/{name}": None for name in sealed.run.below(folder)}):
            damage = check(sealed.run, may_lack=() if has_journal else sealed.places(number))
            assert {one.fetch for one in damage} == (set() if has_journal else {f"run-1/{folder}"})


def test_a_journal_that_was_deleted_is_to_be_fetched_unless_it_was_the_last(world):
    for number, name, _ in journals_of(world):
        is_last = number == JOURNALS
        with world.run.changed({name: None}):
            damage = check(world.run, may_lack=world.places(number), silent=world.places(number) if is_last else ())
            assert {one.fetch for one in damage} == (set() if is_last else {f"run-1/{name.removesuffix('.jsonl')}"})


def other_files(tmp_path, world: World) -> dict[str, Logged]:
    """Runs with the same numbers and as many records: another run, and another writer of this run (moved out of it)."""
    found = {}
    for label in ("another run", "another writer"):
        run_id = "run-2" if label == "another run" else "run-1"
        root = tmp_path / label
        if run_id == "run-1":
            root.mkdir()
            run_folder = root / "run-1"
            run_folder.mkdir()
            (run_folder / format.RUN_FILE).write_bytes(world.run.contents[format.RUN_FILE])
        run = begin_small(root, run_id, is_lead=run_id == "run-2")
        fill_journals(run, journals=JOURNALS, calls=CALLS, label="other")
        for number in (1, 2):
            seal_small(writer_folder(run), number, keep_journal=True)
        found[label] = logged(spool.open(root).run(run_id))
    return found


def of_other(other: Logged, suffix: str) -> dict[str, bytes]:
    """One journal (`000001.jsonl`) or segment (`000001`) of the other's only writer, by names below the writer's folder."""
    (writer,) = other.rows
    return {
        name.removeprefix(f"{writer}/"): content
        for name, content in other.contents.items()
        if name == f"{writer}/{suffix}" or name.startswith(f"{writer}/{suffix}/")
    }


@pytest.mark.parametrize("whose", ["another run", "another writer"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_journal_replaced_by_that_of_another_is_corruption_and_its_rows_are_not_this_runs(
    world, tmp_path, whose, number
):
    foreign = of_other(other_files(tmp_path, world)[whose], format.journal_name(number))
    with world.run.changed({f"{world.writer}/{name}": content for name, content in foreign.items()}):
        damage = check(world.run, may_lack=world.places(number))
        path = str(world.run.path / world.writer / format.journal_name(number))
        assert any(one.path == path and one.fetch is None for one in damage)


@pytest.mark.parametrize("whose", ["another run", "another writer"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_segment_replaced_by_that_of_another_is_corruption_and_its_rows_are_not_this_runs(
    sealed, tmp_path, whose, number
):
    folder = f"{sealed.writer}/{format.segment_name(number)}"
    foreign = of_other(other_files(tmp_path, sealed)[whose], format.segment_name(number))
    has_journal = f"{folder}.jsonl" in sealed.run.contents
    with sealed.run.changed({f"{sealed.writer}/{name}": content for name, content in foreign.items()}):
        damage = check(sealed.run, may_lack=() if has_journal else sealed.places(number))
        assert damage
        assert all(one.path.startswith(str(sealed.run.path / folder)) for one in damage)
        assert {one.fetch for one in damage} == {None}


@pytest.mark.parametrize(("number", "by"), [(1, 2), (2, 1), (2, 3), (3, 1), (3, 2)])
def test_a_journal_replaced_by_another_of_the_same_writer_is_corruption(world, number, by):
    name, other = (f"{world.writer}/{format.journal_name(at)}" for at in (number, by))
    with world.run.changed({name: world.run.contents[other]}):
        damage = check(world.run, may_lack=world.places(number))
        assert any(one.path == str(world.run.path / name) for one in damage)


@pytest.mark.parametrize(("number", "by"), [(1, 2), (2, 1)])
def test_a_segment_replaced_by_another_of_the_same_writer_is_corruption(sealed, number, by):
    folder, other = (f"{sealed.writer}/{format.segment_name(at)}" for at in (number, by))
    has_journal = f"{folder}.jsonl" in sealed.run.contents
    changes = {f"{folder}/{name}": content for name, content in sealed.run.below(other).items()}
    with sealed.run.changed(changes):
        damage = check(sealed.run, may_lack=() if has_journal else sealed.places(number))
        assert any(one.path.startswith(str(sealed.run.path / folder)) for one in damage)


# --- run.json


def info_of(run: Logged) -> dict[str, object]:
    return spool.open(run.path.parent).run(run.path.name).info


@pytest.fixture
def small_run(tmp_path):
    run = begin_small(tmp_path / "s", "run-1")
    fill_journals(run, journals=1, calls=4)
    return World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(run).name)


def check_run_file(world: World, content: bytes) -> None:
    """The records are read all the same, and what run.json says is not believed."""
    with world.run.changed({format.RUN_FILE: content}):
        damage = check(world.run)
        assert {(one.path, one.fetch) for one in damage} == {(str(world.run.path / format.RUN_FILE), None)}
        assert info_of(world.run) == {}


def test_a_flipped_bit_of_run_json_is_found_and_costs_no_record(small_run):
    content = small_run.run.contents[format.RUN_FILE]
    for at in positions(len(content), 60, "run.json"):
        check_run_file(small_run, flip(content, at, random.Random(at).randrange(8)))


@pytest.mark.slow
def test_every_flipped_bit_of_run_json_is_found_and_costs_no_record(small_run):
    content = small_run.run.contents[format.RUN_FILE]
    for at in range(len(content)):
        for bit in range(8):
            check_run_file(small_run, flip(content, at, bit))


def test_a_run_json_cut_at_every_byte_is_found_and_costs_no_record(small_run):
    content = small_run.run.contents[format.RUN_FILE]
    for length in range(len(content) - 1):  # without its newline it is still whole
        check_run_file(small_run, content[:length])


def test_the_run_json_of_another_run_is_not_believed(small_run, tmp_path):
    begin_small(tmp_path / "other", "run-2")
    check_run_file(small_run, (tmp_path / "other" / "run-2" / format.RUN_FILE).read_bytes())


# --- what others know of a writer


@pytest.fixture
def finished(tmp_path):
    """A finished run of two writers with two journals each; the roster of the lead's finish knows both."""
    lead = begin_small(tmp_path / "s", "run-1")
    worker = begin_small(tmp_path / "s", "run-1", is_lead=False)
    for run in (worker, lead):
        fill_journals(run, journals=2, calls=CALLS)
        seal_small(writer_folder(run), 1)
    worker.finish()
    lead.finish()
    for run in (worker, lead):
        (writer_folder(run) / "000002.jsonl").unlink()
    world = World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(worker).name)
    assert check(world.run) == []
    return world


def places_of(run: Logged, writer: str, seqs: Iterable[int]) -> set[Place]:
    return {(writer, table, seq) for table in run.rows[writer] for seq in run.seqs(writer, table) & set(seqs)}


def removed(run: Logged, folder: str) -> dict[str, bytes | None]:
    return dict.fromkeys((f"{folder}/{name}" for name in run.below(folder)), None)


def test_the_last_segment_of_a_worker_is_named_by_the_roster(finished):
    last = finished.run.seqs(finished.writer)
    places = places_of(finished.run, finished.writer, range(CALLS + 1, max(last) + 1))
    with finished.run.changed(removed(finished.run, f"{finished.writer}/000002")):
        damage = check(finished.run, may_lack=places)
        assert {one.fetch for one in damage} == {f"run-1/{finished.writer}"}


def test_a_writer_that_is_not_there_is_named_by_the_roster(finished):
    places = places_of(finished.run, finished.writer, finished.run.seqs(finished.writer))
    with finished.run.changed(removed(finished.run, finished.writer)):
        damage = check(finished.run, may_lack=places)
        assert {one.fetch for one in damage} == {f"run-1/{finished.writer}"}


@pytest.fixture
def resumed(tmp_path):
    """A second attempt, whose header says how far the writer of the first had got."""
    first = begin_small(tmp_path / "s", "run-1")
    fill_journals(first, journals=2, calls=CALLS)
    second = without_thread(spool.init(dir=tmp_path / "s", run_id="run-1", resume=True))
    second.log({"loss": 1.0}, step=9)
    world = World(logged(spool.open(tmp_path / "s").run("run-1")), writer_folder(first).name)
    assert check(world.run) == []
    return world


def test_the_last_journal_of_an_earlier_attempt_is_named_by_the_attempt_that_continues_it(resumed):
    places = places_of(resumed.run, resumed.writer, range(CALLS + 1, 2 * CALLS + 1))
    with resumed.run.changed({f"{resumed.writer}/000002.jsonl": None}):
        damage = check(resumed.run, may_lack=places)
        assert {one.fetch for one in damage} == {f"run-1/{resumed.writer}"}


def test_the_writer_of_an_earlier_attempt_is_named_by_the_attempt_that_continues_it(resumed):
    places = places_of(resumed.run, resumed.writer, range(1, 2 * CALLS + 1))
    with resumed.run.changed(removed(resumed.run, resumed.writer)):
        damage = check(resumed.run, may_lack=places)
        assert {one.fetch for one in damage} == {f"run-1/{resumed.writer}"}


def test_the_last_journal_cut_below_what_a_later_attempt_found_is_no_torn_tail(resumed):
    name = f"{resumed.writer}/000002.jsonl"
    content = resumed.run.contents[name]
    length = line_starts(content)[-1]
    places = places_of(resumed.run, resumed.writer, cut_lines(content, length))
    with resumed.run.changed({name: content[:length]}):
        assert check(resumed.run, may_lack=places)


def test_a_tail_torn_at_any_byte_before_a_later_attempt_stays_no_damage(tmp_path):
    first = begin_small(tmp_path / "s", "run-1")
    fill_journals(first, journals=1, calls=2)
    journal = writer_folder(first) / "000001.jsonl"
    content = journal.read_bytes()
    start = line_starts(content)[-1]
    for at in {start, start + 1, start + 30, len(content) - 12, len(content) - 2, len(content) - 1}:
        journal.write_bytes(content[:at])
        spool.init(dir=tmp_path / "s", run_id="run-1", resume=True)
        assert spool.open(tmp_path / "s").run("run-1").damage() == []


# --- several at once


def harm(world: World, chance: random.Random) -> tuple[str, bytes | None]:
    name, content = chance.choice(sorted(world.run.contents.items()))
    kind = chance.choice(["flip", "flip", "hole", "cut", "delete", "repeat", "other"])
    at = chance.randrange(len(content))
    end = chance.randrange(at, len(content)) + 1
    if kind == "flip":
        return name, flip(content, at, chance.randrange(8))
    if kind == "hole":
        return name, content[:at] + bytes(end - at) + content[end:]
    if kind == "repeat":
        return name, content[:end] + content[at:end] + content[end:]
    if kind == "other":
        suffix = "." + name.rsplit(".", 1)[1]
        return name, world.run.contents[chance.choice(world.run.names(suffix))]
    return name, None if kind == "delete" and name != format.RUN_FILE else content[:at]


def silent_tail(world: World, changes: dict[str, bytes | None]) -> set[Place]:
    """What of the last journal left may be missing as a torn tail, or because nobody knows that it was ever there."""
    found: set[Place] = set()
    for number, name, content in reversed(list(journals_of(world))):
        left = changes.get(name, content)
        if left is None:
            found |= world.places(number)
            if f"{world.writer}/{format.segment_name(number)}/{format.MANIFEST_FILE}" in world.run.contents:
                break
            continue
        tail = left.rfind(b"\n") + 1
        return found | world.places(number, cut_lines(content, tail))
    return found


def check_several(world: World, seed: int) -> None:
    chance = random.Random(seed)
    changes = dict(harm(world, chance) for _ in range(chance.randrange(2, 5)))
    everything = {place for number in range(1, JOURNALS + 1) for place in world.places(number)}
    with world.run.changed(changes):
        check(world.run, may_lack=everything, silent=silent_tail(world, changes))


@pytest.mark.parametrize("keep_journals", [True, False])
def test_several_damages_at_once_deliver_nothing_wrong_and_miss_nothing_in_silence(tmp_path, keep_journals):
    world = sealed_world(tmp_path, keep_journals=keep_journals)
    for seed in range(80):
        check_several(world, seed)


@pytest.mark.slow
@pytest.mark.parametrize("keep_journals", [True, False])
def test_many_damages_at_once_deliver_nothing_wrong_and_miss_nothing_in_silence(tmp_path, keep_journals):
    world = sealed_world(tmp_path, keep_journals=keep_journals)
    for seed in range(1000, 2500):
        check_several(world, seed)
