"""Spools of every released format stay readable for ever, by our reader and by one written from the document alone."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import plain_reader
import pyarrow as pa
import pytest

import spool
from spool import format
from spool.reader import WriterReader
from spool.table import schema
from sync.batch import plain

GOLDEN = Path(__file__).parent / "golden"
SPOOLS = sorted(path.relative_to(GOLDEN) for path in GOLDEN.glob("format-*/*") if path.is_dir())
WITH_JOURNALS = [path for path in SPOOLS if any(GOLDEN.joinpath(path).glob("*/*/*.jsonl"))]
JSON_COLUMNS = ("extra", "inputs", "outputs", "attributes", "body")
PLACE = re.compile(r"(?P<path>\S+): .* at byte (?P<byte>\d+), (?P<length>\d+) bytes \((?P<seqs>.*)\)")


def expected(name: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.expected.json").read_text(encoding="utf-8"))
    return found


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Floats as their exact text, nulls left out."""
    return {name: repr(cell) if isinstance(cell, float) else cell for name, cell in row.items() if cell is not None}


def meant(row: dict[str, Any]) -> dict[str, Any]:
    """JSON texts as what they mean."""
    return row | {name: json.loads(row[name]) for name in JSON_COLUMNS if name in row}


def test_there_are_golden_spools_and_nobody_has_touched_them() -> None:
    assert len(SPOOLS) >= 6
    done = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=GOLDEN, check=False)
    assert done.returncode == 0
    listed = {line.split("  ")[1] for line in (GOLDEN / "SHA256SUMS").read_text().splitlines()}
    assert listed == {str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("format-*/**/*") if path.is_file()}


@pytest.mark.parametrize("name", SPOOLS, ids=str)
def test_a_golden_spool_is_read_as_it_was_written(name: Path) -> None:
    root = GOLDEN / name
    runs = spool.open(root).runs()
    assert [run.id for run in runs] == [one["run"] for one in expected(name)]
    for run, wanted in zip(runs, expected(name), strict=True):
        assert run.status().state == wanted["status"]
        assert [attempt.id for attempt in run.attempts()] == wanted["attempts"]
        assert {writer.id: writer.last_seq for writer in run.writers()} == wanted["writers"]
        for table in format.TABLES:
            rows = plain(pa.concat_tables(piece for writer in run.writers() for piece in raw(writer, table)))
            assert [comparable(row) for row in rows.to_pylist()] == wanted["tables"][table]
        assert [str(one).replace(f"{root}/", "") for one in run.damage()] == wanted["damage"]


def raw(writer: WriterReader, table: str) -> list[pa.Table]:
    return [schema(table).empty_table(), *writer.batches(table)]


@pytest.mark.parametrize("name", WITH_JOURNALS, ids=str)
def test_a_reader_written_from_the_document_finds_the_same(name: Path) -> None:
    for wanted in expected(name):
        found = plain_reader.read(GOLDEN / name / wanted["run"])
        for table, rows in wanted["tables"].items():
            assert [comparable(row) for row in found["tables"][table]] == [meant(row) for row in rows]
        assert {name: max(writer["records"]) for name, writer in found["writers"].items()} == wanted["writers"]
        damage = [
            (f"{wanted['run']}/{writer}/{path}", *place)
            for writer, one in found["writers"].items()
            for path, *place in one["damage"]
        ]
        told = [PLACE.fullmatch(line) for line in wanted["damage"]]
        assert damage == [
            (one["path"], int(one["byte"]), int(one["length"]), *seqs(one["seqs"])) for one in told if one
        ]
        fetch = [
            line.split("fetch ")[1].split(":")[0] for line in wanted["damage"] if line.startswith("incomplete copy")
        ]
        assert [f"{wanted['run']}/{one}" for one in found["fetch"]] == fetch


def seqs(text: str) -> tuple[int, int] | tuple[None, None]:
    found = re.findall(r"\d+", text) if text.startswith("seq") else []
    return (int(found[0]), int(found[-1])) if found else (None, None)


def test_a_segment_without_its_journal_needs_a_parquet_reader() -> None:
    [(_, writer)] = plain_reader.read(GOLDEN / "format-1" / "sealed" / "r")["writers"].items()
    assert (writer["unread"], writer["records"]) == (["000001", "000002"], {})


FIRST = GOLDEN / "format-1/resumed/r/node1-77-31ac2d59/000001.jsonl"


@pytest.mark.parametrize(
    ("tail", "last_seq", "damage"),
    [
        (b"\n" + b'{"seq":4,"ts":17', 3, []),
        (b"", 2, []),
        (b"\0\0\0", 2, []),
        (b'x{"seq":4', 3, [1]),
    ],
    ids=["torn", "no newline", "zeros", "a damaged newline"],
)
def test_both_readers_see_a_torn_tail_alike(tmp_path: Path, tail: bytes, last_seq: int, damage: list[int]) -> None:
    journal = tmp_path / "r" / FIRST.parent.name / FIRST.name
    journal.parent.mkdir(parents=True)
    (tmp_path / "r" / "run.json").write_bytes((FIRST.parent.parent / "run.json").read_bytes())
    journal.write_bytes(FIRST.read_bytes()[:-1] + tail)
    [(_, found)] = plain_reader.read(tmp_path / "r")["writers"].items()
    assert (max(found["records"]), [place[2] for place in found["damage"]]) == (last_seq, damage)
    [writer] = spool.open(tmp_path).run("r").writers()
    assert (writer.last_seq, [one.length for one in writer.damage()]) == (last_seq, damage)
