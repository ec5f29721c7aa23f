"""docs/format.md is the specification: its example must be a journal that the code reads to the rows it describes."""

import re
from pathlib import Path

import pyarrow as pa

import spool
from spool import format, seal

DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"


def example() -> str:
    found = re.search(r"<!-- journal -->\n```json\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def make_spool(folder: Path) -> Path:
    header = format.decode(example().splitlines()[0].encode())
    run = folder / header["run"]
    (run / header["writer"]).mkdir(parents=True)
    info = {
        "format": 1,
        "run": run.name,
        "project": "p",
        "experiment": "e",
        "created_ns": 1,
        "attempt": header["attempt"],
    }
    (run / "run.json").write_bytes(format.checked_json(info))
    journal = run / header["writer"] / "000001.jsonl"
    journal.write_text(example(), encoding="utf-8")
    return journal


def check_rows(root: Path) -> None:
    run = spool.open(root).runs()[0]
    metrics = run.metrics().select(["seq", "step", "ordinal", "key", "exact", "kind"]).to_pylist()
    assert [tuple(row.values()) for row in metrics] == [
        (1, 5, None, "critic/score/mean", None, "float"),
        (1, 5, None, "actor/grad_norm", None, "float"),
        (1, 5, None, "tokens", "1180591620717411303424", "int"),
        (1, 5, None, "note", "warm", "text"),
        (2, None, 1, "loss", None, "float"),
    ]
    assert run.metrics()["value"].to_pylist()[0] == 0.41
    generation = run.generations().to_pylist()[0]
    assert (generation["output"], generation["score"], generation["extra"]) == ("42", 1.0, '{"turns":2}')
    span = run.spans().to_pylist()[0]
    assert (span["name"], span["inputs"], span["outputs"], span["status"]) == (
        "calculator",
        '{"expr":"6*7"}',
        "42",
        "OK",
    )
    assert run.spans()["end"].cast(pa.int64()).to_pylist() == [1796126400390000000]
    assert run.status().state == "finished"
    assert run.damage() == []


def test_the_documents_journal_is_intact_to_the_byte() -> None:
    lines = example().encode().splitlines()
    assert len(lines) == 6
    assert all(format.is_intact(line) for line in lines)
    length = len(b"\n".join(lines[:5])) + 1
    assert format.decode(lines[5])["body"]["roster"]["node1-77-31ac2d56"]["length"] == length


def test_the_documents_journal_reads_as_described(tmp_path: Path) -> None:
    make_spool(tmp_path)
    check_rows(tmp_path)


def test_the_documents_journal_sealed_reads_the_same(tmp_path: Path) -> None:
    journal = make_spool(tmp_path)
    seal.seal(journal)
    journal.unlink()
    check_rows(tmp_path)


def test_the_documents_tables_are_the_codes_tables() -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("| table | further columns |")[1].split("### manifest")[0]
    for name, columns in format.TABLES.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        for column, _ in columns:
            assert f"`{column}`" in row, f"{name}.{column} is not documented"
