"""A reader of format 1 in standard Python, written from docs/format.md and not from the code: the document is complete.

It reads journals. What only a segment holds needs a Parquet reader, and is named as unread.
"""

import json
import re

KINDS = {bool: "bool", int: "int", float: "float", type(None): "null"}
CRC_TABLE = list(range(256))
for _ in range(8):
    CRC_TABLE = [entry >> 1 ^ (0x82F63B78 if entry & 1 else 0) for entry in CRC_TABLE]


def proof(data):
    """The 18 bytes that prove `data` when they follow it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 255]
    return b',"crc":"%08x"}' % (crc ^ 0xFFFFFFFF)


def intact(data):
    """(start, end) of each object that proves itself, and at last (tail, tail): where the torn tail begins."""
    at, tail = 0, data.rfind(b"\n") + 1
    complete = tail
    for line in data.split(b"\n"):
        start = 0
        while start >= 0:
            ends = [len(line), *(found.end() for found in re.finditer(rb',"crc":"[0-9a-f]{8}"}', line))]
            end = next(
                (one for one in ends if one > start and line[one - 18 : one] == proof(line[start : one - 18])), 0
            )
            if end and (at < tail or data[at + end : at + end + 1].strip(b"\0")):
                yield at + start, at + end
                complete = max(complete, at + end + 1)
            start = line.find(b'{"seq":', end or start + 1)
        at += len(line) + 1
    yield complete, complete


def rows(record):
    """(table, columns of its own) of each row of a record; a column that is null is left out."""
    for field, kind in (("metrics", None), ("decimals", "decimal"), ("texts", "text")):
        for key, value in record.get(field, {}).items():
            exact = value if isinstance(value, str) and (kind or value[-1].isdigit()) else None
            row = {"key": key, "exact": exact, "kind": kind or KINDS.get(type(value)) or ("int" if exact else "float")}
            yield "metrics", row | {"value": None if kind == "text" or value is None else float(value)}
    if "generation" in record:
        score = record["generation"].get("score")
        yield "generations", record["generation"] | {"score": score if score is None else float(score)}
    if "span" in record:
        yield "spans", record["span"]
    if "event" in record:
        yield "events", {"kind": record["event"], "body": record["body"]}
    if "replaced" in record:
        yield "events", {"kind": "replaced", "body": {"count": record["replaced"]}}


def read_writer(folder):
    """One writer: its attempt, records by seq, damage as [path, byte, length, first seq, last seq], and what is not here."""
    found = {"attempt": (0, ""), "records": {}, "damage": [], "fetch": [], "unread": [], "promised": []}
    numbers = {int(path.stem) for path in folder.glob("[0-9]*")}
    top, places = 0, []
    for number in range(1, max(numbers) + 1):
        path, end = folder / f"{number:06d}.jsonl", 0
        if not path.exists():
            found["unread" if number in numbers else "fetch"].append(path.stem)
        data = path.read_bytes() if path.exists() else b""
        for start, stop in intact(data):
            if start > end:
                places.append((top, path.name, end, start - end))
            end = stop + (data[stop : stop + 1] == b"\n")
            record = json.loads(data[start:stop] or "{}")
            if "format" in record:
                found["attempt"] = record["attempt"]["number"], record["attempt"]["id"]
                found["promised"] += record.get("continues", {}).get("positions", {}).items()
            elif "seq" in record:
                if record["seq"] <= top:
                    places.append((top, path.name, start, end - start))
                found["records"].setdefault(record["seq"], record)
                top = max(top, record["seq"])
                if record.get("event") == "finish":
                    roster = record["body"].get("roster", {})
                    found["promised"] += [(writer, last["seq"]) for writer, last in roster.items()]
    for before, *place in places:
        after = min((seq for seq in found["records"] if seq > before), default=before + 1)
        found["damage"].append([*place, *((before + 1, after - 1) if after > before + 1 else (None, None))])
    return found


def read(run):
    """The rows of a run by table, and each writer as `read_writer` has it; "fetch" names what a copy lacks."""
    folders = [path for path in sorted(run.glob("[!.]*/")) if path.name != "files" and any(path.glob("[0-9]*"))]
    writers = {folder.name: read_writer(folder) for folder in folders}
    tables = {"metrics": [], "generations": [], "spans": [], "events": []}
    for name, writer in sorted(writers.items(), key=lambda one: (one[1]["attempt"], one[0])):
        for seq, record in sorted(writer["records"].items()):
            common = {"run_id": run.name, "writer_id": name, "attempt": writer["attempt"][1], "seq": seq}
            common |= {column: record.get(column) for column in ("ts", "step", "ordinal")}
            for table, row in rows(record):
                tables[table].append({column: cell for column, cell in (common | row).items() if cell is not None})
    fetch = [f"{name}/{number}" for name, writer in writers.items() for number in writer["fetch"]]
    for name, seq in (promise for writer in writers.values() for promise in writer["promised"]):
        fetch += [name] if name not in writers or seq > max(writers[name]["records"], default=0) else []
    return {"tables": tables, "writers": writers, "fetch": fetch}
