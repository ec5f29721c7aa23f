"""Reading a journal after damage: what is intact is delivered, what is not is named, and a torn tail is neither."""

import pytest
from journals import JournalFile, begin, begin_without_thread, journal_path, reader, rows, small_journal

from spool import format
from spool.journal import scan
from spool.reader import WriterReader


@pytest.fixture
def journal(tmp_path):
    with small_journal(tmp_path) as found:
        yield found


def seqs_of(journal: JournalFile) -> list[int]:
    return list(scan(journal.path).seqs)


ALL = [1, 2, 3, 4, 5, 6]


def test_an_undamaged_journal_is_read_whole(journal):
    found = journal.write(journal.content)
    assert (list(found.seqs), found.damage, found.is_torn) == (ALL, [], False)
    assert found.valid_length == found.size == len(journal.content)


def test_a_torn_tail_is_dropped_without_complaint_at_every_byte(journal):
    for length in range(journal.starts()[-1], len(journal.content)):
        found = journal.cut(length)
        assert list(found.seqs) == ALL[:-1]
        assert found.valid_length == journal.starts()[-1]
        assert journal.reopen().damage() == []


def test_a_journal_cut_anywhere_is_a_prefix_without_complaint(journal):
    for length in range(len(journal.content)):
        found = journal.cut(length)
        whole = journal.content[:length].count(b"\n")
        assert list(found.seqs) == ALL[: max(0, whole - 1)]
        assert found.damage == []


def test_a_flipped_byte_is_named_with_path_offset_and_seq_and_every_other_record_is_delivered(journal):
    starts = journal.starts()
    for at in range(len(journal.content)):
        line = max(place for place, start in enumerate(starts) if start <= at)
        found = journal.flip(at)
        on_newline = journal.content[at : at + 1] == b"\n"
        assert list(found.seqs) == [seq for seq in ALL if seq != line or on_newline], at
        assert {one.path for one in found.damage} == {str(journal.path)}
        if on_newline:
            assert [(one.offset, one.length, one.reason) for one in found.damage] == [(at, 1, "damaged newline")]
            continue
        assert found.damage[0].offset == starts[line]
        assert any(one.offset <= at < one.offset + one.length for one in found.damage)
        last = None if line == len(starts) - 1 else line
        assert (found.damage[0].first_seq, found.damage[0].last_seq) == ((None, None) if line == 0 else (line, last)), (
            at
        )


@pytest.mark.slow
def test_every_flipped_bit_is_found(journal):
    for at in range(len(journal.content)):
        for bit in range(8):
            assert journal.flip(at, 1 << bit).damage


def test_the_readers_deliver_what_is_left_of_a_flipped_journal(tmp_path):
    run = begin(tmp_path)
    for step in range(4):
        run.log({"a": float(step)}, step=step)
    path = journal_path(run)
    journal = JournalFile(path, path.read_bytes())
    journal.flip(journal.starts()[3] + 20)
    assert [row["value"] for row in rows(run)] == [0.0, 2.0, 3.0]
    (damage,) = reader(run).damage()
    assert (
        str(damage) == f"{path}: checksum mismatch at byte {journal.starts()[3]}, {len(journal.lines[3])} bytes (seq 3)"
    )
    path.write_bytes(journal.content)


def test_a_hole_of_zeros_loses_only_the_records_it_touches(journal):
    starts = journal.starts()
    found = journal.fill(starts[2] + 5, starts[4] + 5)
    assert list(found.seqs) == [1, 5, 6]
    (damage,) = found.damage
    assert (damage.first_seq, damage.last_seq, damage.offset) == (2, 4, starts[2])


def test_zeros_at_the_end_may_still_become_visible_and_are_no_damage(journal):
    found = journal.write(journal.content + b"\0" * 5000)
    assert (list(found.seqs), found.damage, found.is_torn) == (ALL, [], True)


def test_a_duplicate_line_is_damage_and_is_delivered_once(journal):
    found = journal.arrange(0, 1, 2, 2, 3, 4, 5, 6)
    assert list(found.seqs) == ALL
    assert [one.reason for one in found.damage] == ["record 2 out of order or repeated"]


def test_swapped_lines_are_damage_and_are_delivered_in_order(journal):
    found = journal.arrange(0, 1, 3, 2, 4, 5, 6)
    assert list(found.seqs) == ALL
    assert [one.reason for one in found.damage] == ["record 2 out of order or repeated"]
    assert [record["seq"] for record in found.records()] == ALL


def test_a_missing_line_is_named_by_its_seq(journal):
    found = journal.arrange(0, 1, 2, 5, 6)
    assert list(found.seqs) == [1, 2, 5, 6]
    (damage,) = found.damage
    assert (damage.reason, damage.first_seq, damage.last_seq) == ("records missing", 3, 4)


def test_several_damaged_newlines_lose_nothing(journal):
    starts = journal.starts()
    content = bytearray(journal.content)
    for start in [*starts[2:5], len(content)]:
        content[start - 1] = 0x0B
    found = journal.write(bytes(content))
    assert list(found.seqs) == ALL
    assert [one.reason for one in found.damage] == ["damaged newline"] * 4


def test_a_damaged_newline_before_a_torn_tail_loses_no_whole_record(journal):
    start = journal.starts()[-1]
    content = bytearray(journal.content[:-9])
    content[start - 1] ^= 1
    found = journal.write(bytes(content))
    assert list(found.seqs) == ALL[:-1]
    assert [(one.offset, one.reason) for one in found.damage] == [(start - 1, "damaged newline")]
    assert found.valid_length == start


def test_a_damaged_header_costs_no_record_and_another_journal_tells_the_attempt(tmp_path):
    run = two_journals(tmp_path)
    first = run.path / own_folder(run) / "000001.jsonl"
    content = first.read_bytes()
    first.write_bytes(b"x" + content[1:])
    found = WriterReader(first.parent)
    assert found.attempt == run.attempt
    assert [(one.offset, one.first_seq) for one in found.damage()] == [(0, None)]
    assert [row["value"] for row in rows(run)] == [float(at) for at in range(12)]


def test_a_damaged_header_of_a_later_journal_is_no_missing_record(tmp_path):
    run = two_journals(tmp_path)
    second = run.path / own_folder(run) / "000002.jsonl"
    content = second.read_bytes()
    second.write_bytes(b"x" + content[1:])
    assert [(one.offset, one.first_seq) for one in WriterReader(second.parent).damage()] == [(0, None)]


def test_a_damaged_last_line_is_named_once_with_the_seq_that_the_next_journal_tells(tmp_path):
    run = two_journals(tmp_path)
    first = run.path / own_folder(run) / "000001.jsonl"
    content = bytearray(first.read_bytes())
    content[-30] ^= 1
    first.write_bytes(bytes(content))
    last = scan(first.with_name("000002.jsonl")).header["first_seq"] - 1
    assert [(one.reason, one.first_seq, one.last_seq) for one in WriterReader(first.parent).damage()] == [
        ("checksum mismatch", last, last)
    ]


def test_a_missing_middle_journal_is_named_by_its_seqs(tmp_path):
    run = two_journals(tmp_path, calls=24)
    folder = run.path / own_folder(run)
    middle = scan(folder / "000002.jsonl")
    (folder / "000002.jsonl").unlink()
    (damage,) = WriterReader(folder).damage()
    assert damage.fetch == f"{run.id}/{folder.name}/000002"
    assert (damage.first_seq, damage.last_seq) == (middle.header["first_seq"], middle.last_seq)
    values = [row["value"] for row in rows(run)]
    assert values[0] == 0.0
    assert values[-1] == 23.0
    assert len(values) == 24 - len(middle.seqs)


def test_a_header_that_was_swapped_down_still_tells_whose_the_journal_is(journal):
    found = journal.arrange(1, 0, 2, 3, 4, 5, 6)
    assert list(found.seqs) == ALL
    assert found.header is not None
    assert [one.reason for one in found.damage] == ["a header that is not the first line"]


def test_an_empty_journal_is_one_that_was_just_begun(journal):
    found = journal.write(b"")
    assert (list(found.seqs), found.damage, found.header) == ([], [], None)
    assert journal.reopen().damage() == []


def test_lines_longer_than_a_block_are_read(tmp_path):
    run = begin(tmp_path)
    for size in (1 << 20, (1 << 20) - 1, 3 << 20, 5):
        run.log({"text": "x" * size})
    assert [len(row["exact"]) for row in rows(run)] == [1 << 20, (1 << 20) - 1, 3 << 20, 5]


def two_journals(tmp_path, calls=12):
    """A writer that began its next journal each six records, and has sealed none."""
    run = begin_without_thread(tmp_path)
    writer = run._writer
    for step in range(calls):
        run.log({"a": float(step)}, step=step)
        if step % 6 == 5 and step < calls - 1:
            writer._rotate()
    return run


def own_folder(run) -> str:
    return run._writer.folder.name


def test_the_next_journal_names_length_and_hash_of_the_one_before(tmp_path):
    run = two_journals(tmp_path)
    folder = run.path / own_folder(run)
    first, second = scan(folder / "000001.jsonl"), scan(folder / "000002.jsonl")
    assert second.header["previous"] == {"length": first.valid_length, "sha256": first.sha256}
    assert second.header["first_seq"] == first.last_seq + 1
    assert first.header["previous"] is None
    assert format.journal_name(2) == "000002.jsonl"
