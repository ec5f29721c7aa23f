"""sync without any destination: names, documents, batches, cursors, open spans, and what the command line says to bad input."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syncing import ROOT, record

from spool import cursor, table
from sync import destinations, document, name
from sync.batch import Batch
from sync.progress import Progress
from sync.series import Histories, Names, Point, clamped
from sync.span import OpenSpans

keys = st.text(min_size=0, max_size=300)


# --- names


@settings(deadline=None)  # the first example imports MLflow
@given(keys)
def test_any_key_becomes_a_name_that_mlflow_takes(key: str) -> None:
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(name.tracker_key(key))
    validation._validate_tag_name(f"spool.key.{name.suffixed(name.tracker_key(key), key)}")
    assert len(f"spool.inf.{name.suffixed(name.tracker_key(key), key)}") <= 250


@pytest.mark.parametrize(
    ("key", "verls"),
    [
        ("val-core/openai/gsm8k/acc/mean@4", "val-core/openai/gsm8k/acc/mean_at_4"),
        ("timing(s)/gen", "timing_s_/gen"),
        ("a//b", "a/b"),
        ("perf/max memory: GB", "perf/max memory: GB"),
        ("学习率", "学习率"),
    ],
)
def test_names_are_those_of_verls_own_logger(key: str, verls: str) -> None:
    assert name.tracker_key(key) == verls


@given(st.lists(keys, unique=True, max_size=30))
def test_keys_known_together_get_distinct_names_whatever_their_order(some: list[str]) -> None:
    names = name.distinct(some)
    assert set(names) == set(some)
    assert len(set(names.values())) == len(some)
    assert names == name.distinct(reversed(some))


@given(st.lists(st.sampled_from(["a@b", "a_at_b", "a//b", "a/b", "a\nb", "a_b", "x" * 300, "y"]), max_size=20))
def test_a_name_once_claimed_stays_with_its_key_after_a_restart(order: list[str]) -> None:
    first = Names([], {})
    claims: dict[str, str] = {}
    for key in order:
        claims |= first.claim([key])
    restarted = Names({first.of(key) for key in order}, claims)
    assert {key: restarted.of(key) for key in order} == {key: first.of(key) for key in order}
    assert len({first.of(key) for key in order}) == len(set(order))


def test_config_is_flattened_as_verl_does() -> None:
    config = {"a": {"b": [1, {"c": None}], "d": {}}, "e": True}
    assert dict(name.flatten(config)) == {
        "a/b/list_len": "2",
        "a/b/0": "1",
        "a/b/1/c": "None",
        "a/d": "{}",
        "e": "True",
    }


# --- points


def test_points_are_told_apart_as_the_database_does() -> None:
    points = [Point("loss", 1, 2, value) for value in (0.0, math.nan, 1.0)]
    histories = Histories(["loss"], lambda _: points)
    there = [Point("loss", 1, 2, -0.0), Point("loss", 1, 2, -math.nan)]
    absent = [Point("loss", 1, 3, 1.0), Point("loss", 1, 2, math.nextafter(1.0, 2)), Point("other", 1, 2, 1.0)]
    assert histories.hold(there + absent) == [True, True, False, False, False]
    assert histories.indistinct == 0
    assert histories.hold([Point("loss", 1, 2, 0.0)]) == [True]
    assert (histories.indistinct, histories.count()) == (1, 3)
    assert clamped(-math.inf) == -sys.float_info.max


# --- documents


def _generation(seq: int, **changes: object) -> dict[str, object]:
    row = {"writer_id": "w", "attempt": "1-a", "seq": seq, "ts": seq * 10, "step": 5, "ordinal": None, "split": "val"}
    return (
        row | {"index": seq, "input": "in", "output": "out", "label": None, "score": 1.0, "extra": '{"a":1}'} | changes
    )


@given(st.lists(st.lists(st.integers(1, 12), max_size=6), max_size=5), st.randoms())
def test_a_document_ends_the_same_in_whatever_portions_and_order_its_rows_arrive(
    portions: list[list[int]], random: object
) -> None:
    whole = document.add(None, "generations", [_generation(seq) for portion in portions for seq in portion])
    random.shuffle(portions)  # type: ignore[attr-defined]
    content = document.add(None, "generations", [])
    for portion in portions:
        content = document.add(content, "generations", [_generation(seq) for seq in portion])
    assert content == whole
    assert document.identities(content, "generations") == {f"w/{seq}" for portion in portions for seq in portion}


def test_a_document_cut_by_a_kill_holds_nothing_and_is_made_anew() -> None:
    content = document.add(None, "generations", [_generation(1)])
    for length in (0, 1, len(content) // 2, len(content) - 1):
        assert document.identities(content[:length], "generations") == set()
        assert document.add(content[:length], "generations", [_generation(1)]) == content


def test_documents_are_json_that_browsers_read() -> None:
    content = document.add(None, "generations", [_generation(1, score=math.nan), _generation(2, score=-math.inf)])
    rows = json.loads(content, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["data"]
    assert [row[5] for row in rows] == ["NaN", "-Infinity"]


@pytest.mark.parametrize("split", ["val", "..", "a/b", "", "x" * 400, "a\\b", "验证", "a b:c"])
def test_any_split_makes_a_path_of_plain_parts(split: str) -> None:
    path = document.path_of("generations", _generation(1, split=split))
    folder, one, file = path.split("/")
    assert (folder, file) == ("generations", "step_000005.json")
    assert set(one) - {"."}
    assert not set(one) & set('\\:"<>|?*')


# --- batches


def _metrics(rows: list[tuple[int, str]]) -> pa.Table:
    records: dict[int, dict[str, float]] = {}
    for seq, key in rows:
        records.setdefault(seq, {})[key] = 1.0
    lines = [{"seq": seq, "ts": seq, "step": seq, "metrics": metrics} for seq, metrics in records.items()]
    [(_, batch)] = table.batches(lines, table.Identity("run", "w", "1-a"), ["metrics"])
    return pa.Table.from_batches([batch])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.integers(1, 7))
def test_a_part_of_a_batch_moves_the_cursor_only_past_whole_records(widths: list[int], max_rows: int) -> None:
    rows = [(seq, f"k{key}") for seq, width in enumerate(widths, start=1) for key in range(width)]
    batch = Batch("metrics", "w", _metrics(rows), len(widths))
    done = 0
    parts = list(batch.split(max_rows))
    for part in parts:
        done += part.rows.num_rows
        assert part.rows.num_rows <= max_rows
        assert part.cursor == max(seq for seq in range(len(widths) + 1) if sum(widths[:seq]) <= done)
    assert done == len(rows)
    assert pa.concat_tables([part.rows for part in parts]).equals(batch.rows)


def test_times_keep_their_nanoseconds() -> None:
    assert (
        Batch("metrics", "w", _metrics([(1_700_000_000_123_456_789, "k")]), None).dicts()[0]["ts"]
        == 1_700_000_000_123_456_789
    )


# --- spans


def _spans(*rows: tuple[int, str, int | None]) -> pa.Table:
    body = {"trace_id": "a" * 32, "name": "n", "type": "TOOL", "start": 5}
    lines = [
        {
            "seq": seq,
            "ts": seq,
            "step": 1,
            "span": body | {"span_id": span, "status": "OK" if end else "OPEN", "end": end},
        }
        for seq, span, end in rows
    ]
    [(_, batch)] = table.batches(lines, table.Identity("run", "w", "1-a"), ["spans"])
    return pa.Table.from_batches([batch])


def test_spans_left_open_are_closed_at_the_last_sign_of_life_and_say_so() -> None:
    spans = OpenSpans()
    ended = [spans.take(part) for part in (_spans((1, "x", None), (2, "y", None)), _spans((3, "y", 9)))]
    assert [part["span_id"].to_pylist() for part in ended] == [[], ["y"]]
    [closed] = Batch("spans", "w", spans.closed(70), None).dicts()
    assert (closed["span_id"], closed["end"], closed["status"]) == ("x", 70, "ERROR")
    assert closed["message"] == "the process ended before the span did"
    assert json.loads(closed["attributes"]) == {"spool.open": True}
    assert not len(OpenSpans().closed(70))


# --- cursors


def _cursor(folder: Path, identity: str = "run-1") -> cursor.Cursor:
    return cursor.load(folder, "mlflow", identity, "r")


def test_a_cursor_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    one = _cursor(tmp_path)
    one.delivered, one.rejected = {"w": {"metrics": 7}}, {"w": {"spans": {"3": "no"}}}
    one.save()
    assert _cursor(tmp_path) == one
    assert _cursor(tmp_path, "run-2").delivered == {}
    assert not list(tmp_path.glob("**/.*.json.*"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "identity": "x", "run_id": "r"}']
)
def test_an_unreadable_cursor_is_moved_aside_and_never_lost(tmp_path: Path, content: bytes) -> None:
    _cursor(tmp_path).save()
    for number in (1, 2):
        (tmp_path / "mlflow" / "run-1.json").write_bytes(content)
        found = _cursor(tmp_path)
        assert found.moved_aside == tmp_path / "mlflow" / f"run-1.unreadable-{number}"
        assert found.moved_aside.read_bytes() == content
        assert found.delivered == {}


def test_a_destinations_name_for_its_run_may_be_anything(tmp_path: Path) -> None:
    for identity in ("../../x", "entity/project/run", "", "x" * 300):
        one = _cursor(tmp_path, identity)
        one.save()
        assert one.path.parent == tmp_path / "mlflow"
        assert _cursor(tmp_path, identity) == one


# --- progress


def test_there_is_a_bar_on_a_terminal_and_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    pty = pytest.importorskip("pty", reason="terminals are made by POSIX only")
    shown, terminal = pty.openpty()
    plain = io.StringIO()
    for stream in (open(terminal, "w"), plain):  # noqa: PTH123, SIM115 - a descriptor, closed below
        monkeypatch.setattr("sys.stderr", stream)
        with Progress(10) as progress:
            progress.advance("run-a", "metrics", 4)
            monkeypatch.setattr("sync.progress._LINE_EVERY_S", 0)
            progress.advance("run-a", "spans", 6)
            monkeypatch.undo()
            monkeypatch.setattr("sys.stderr", stream)
        stream.flush()
    bar = os.read(shown, 65536).decode()
    assert "100%" in bar
    assert "run-a spans" in bar
    assert re.fullmatch(r"run-a spans: 10/10, \d+/s, about 0 s left\n", plain.getvalue())


# --- the command line


def _run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SPOOL_")}
    return subprocess.run(
        [sys.executable, "-m", "sync", *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(ROOT), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny_spool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = "for name in 'ab': spool.init(project='p', experiment=name, run_id=f'run-{name}').finish()"
    return record(tmp_path_factory.mktemp("tiny"), source)


def test_destinations_are_listed_without_importing_an_sdk() -> None:
    program = "import sys; from sync import destinations; print(destinations.names(), 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["['jsonl',", "'mlflow']", "False"]
    assert destinations.names() == ["jsonl", "mlflow"]


def test_what_is_no_spool_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in ("nowhere", "file", "."):
        done = _run(tmp_path, path, "--to", "mlflow")
        assert done.returncode == 1
        assert done.stderr.startswith("spool-sync: ")
        assert done.stderr.count("\n") == 1


def test_a_newer_format_is_refused_in_one_sentence(tmp_path: Path, tiny_spool: Path) -> None:
    spool = shutil.copytree(tiny_spool, tmp_path / "spool-data")
    info = spool / "run-a" / "run.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"format": 99}))
    done = _run(tmp_path, "--to", "mlflow")
    assert done.returncode == 1
    assert "format 99" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_match_and_several_matches_are_not_success(tmp_path: Path, tiny_spool: Path) -> None:
    for selector, words in (("nope", "no run"), ("run-", "run-a, run-b")):
        done = _run(tmp_path, str(tiny_spool), "--to", "mlflow", "--run", selector)
        assert done.returncode == 1
        assert words in done.stderr


def test_wrong_use_exits_2(tmp_path: Path, tiny_spool: Path) -> None:
    assert _run(tmp_path, str(tiny_spool)).returncode == 2
    assert _run(tmp_path, str(tiny_spool), "--to", "nowhere").returncode == 2
    assert _run(tmp_path, str(tiny_spool), "--to", "mlflow", "--all", "--run", "run-a").returncode == 2


def test_a_missing_sdk_says_what_to_install(tmp_path: Path, tiny_spool: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text("import sys; sys.modules['mlflow'] = None")
    done = _run(tmp_path, str(tiny_spool), "--to", "mlflow", PYTHONPATH=f"{tmp_path / 'blocked'}:{ROOT}")
    assert done.returncode == 1
    assert "pip install 'spool-sync[mlflow]'" in done.stderr
    assert "Traceback" not in done.stderr
