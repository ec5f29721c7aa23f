"""The processes that test_death.py lets die, and what they log: the same on both sides of the kill, from a name and a number.

    python mortal.py trainer FOLDER PIPE PREFIX THREADS    logs from several threads until it is killed
    python mortal.py steps WORKLOAD ROOT once|twice        a fresh process for each change of the disk, which dies there
    python mortal.py sealers FOLDER PIPE FIRST EACH        a trainer that lives on while its sealing children die

A call that has returned is told by one byte: the letter of its thread.
"""

import os
import random
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from journals import without_thread

import spool
from spool import cli, environment, files, seal, writer
from spool.run import Run

NAN = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]
SAVED = b"lr: 1.0\n"
Row = tuple[Any, ...]


def bits(value: float | None) -> str | None:
    """Equal for equal bits; all NaNs are one."""
    return None if value is None else "nan" if value != value else struct.pack("<d", value).hex()  # noqa: PLR0124


class Stream:
    """The calls of one thread, numbered from 0: metrics, generations, the start of a span, its end, metrics, …"""

    def __init__(self, name: str) -> None:
        self.name = name

    def values(self, at: int) -> tuple[float, float, int, str]:
        """Random bits, a finite number, an integer of 80 bits, a text."""
        chance = random.Random(f"{self.name} {at}")
        any_bits = struct.unpack("<d", chance.randbytes(8))[0]
        big = chance.choice([-1, 1]) * (chance.getrandbits(79) | 1 << 79)
        return (
            any_bits,
            chance.uniform(-1e300, 1e300),
            big,
            "é\n\0\u2028🌱"[: chance.randrange(6)] * chance.randrange(20),
        )

    def metrics(self, at: int) -> dict[str, Any]:
        any_bits, finite, big, text = self.values(at)
        numbers = {"n": at, "bits": any_bits, "finite": finite, "nan": NAN, "zero": -0.0, "tiny": 5e-324}
        return {f"{self.name}/{key}": value for key, value in {**numbers, "big": big, "text": text}.items()}

    def generations(self, at: int) -> list[dict[str, Any]]:
        _, finite, big, text = self.values(at)
        return [
            {"input": text, "output": f"{text}{part}", "label": str(big), "score": finite, "n": at} for part in (0, 1)
        ]

    def calls(self, run: Run) -> Iterator[Callable[[], object]]:
        for at in count(0, 4):
            yield lambda at=at: run.log(self.metrics(at), step=at)
            yield lambda at=at: run.log_generations(step=at + 1, rows=self.generations(at + 1), split=self.name)
            _, finite, _, text = self.values(at + 2)
            span = run.span(self.name, step=at + 2, inputs={"text": text}, attributes={"n": at + 2})
            yield span.start
            span.outputs = [finite]
            yield span.end

    def rows(self, at: int) -> list[Row]:
        """What call `at` leaves in the tables."""
        _, finite, _, text = self.values(at // 4 * 4 + 2)
        match at % 4:
            case 0:
                return [_metric_row(at, key, value) for key, value in self.metrics(at).items()]
            case 1:
                shown = [
                    (row["input"], row["output"], row["label"], bits(row["score"])) for row in self.generations(at)
                ]
                return [(at, index, *row, f'{{"n":{at}}}') for index, row in enumerate(shown)]
            case 2:
                return [(at, "OPEN", {"text": text}, None, {"n": at})]
            case _:
                return [(at - 1, "OK", {"text": text}, [finite], {"n": at - 1})]


def _metric_row(step: int, key: str, value: object) -> Row:
    match value:
        case str():
            return step, key, None, value, "text"
        case int() if abs(value) > 1 << 53:
            return step, key, bits(float(value)), str(value), "int"
        case int():
            return step, key, bits(float(value)), None, "int"
        case float():
            return step, key, bits(value), None, "float"
    raise AssertionError(value)


def log(run: Run, name: str, calls: int, told: int) -> None:
    for call, _ in zip(Stream(name).calls(run), range(calls), strict=False):
        call()
        os.write(told, name[-1].encode())


def log_in_threads(run: Run, prefix: str, names: str, calls: int, told: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=log, args=(run, prefix + name, calls, told)) for name in names]
    for thread in threads:
        thread.start()
    return threads


# --- dying


def die_at(step: int, *, after: bool) -> None:
    """SIGKILL this process at its `step`-th change of the disk from now on, before it is done or after."""
    numbers = count()

    def mortal(real: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any) -> Any:
            is_it = next(numbers) == step
            if is_it and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*arguments)
            finally:
                if is_it:
                    os.kill(os.getpid(), signal.SIGKILL)

        return done

    for name in files.STEPS:
        setattr(files, name, mortal(getattr(files, name)))


def begin(folder: Path, told: int, **settings: Any) -> Run:
    run = spool.init(project="p", dir=folder, run_id="r", **settings)
    os.write(told, b"!")
    return run


def nothing(_: Path) -> None:
    pass


def begins(folder: Path, told: int) -> None:
    log(begin(folder, told), "a", 2, told)


def rotates(folder: Path, told: int) -> None:
    sys.executable = ""  # journals stay: sealing has workloads of its own
    run = begin(folder, told)
    threads = log_in_threads(run, "", "ab", 12, told)
    for thread in threads:
        thread.join()
    assert run._writer is not None
    for call in Stream("c").calls(run):
        call()
        os.write(told, b"c")
        if run._writer._live.number >= 3:
            return
        time.sleep(0.001)


def has_died(folder: Path) -> None:
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log(begin(folder, told), "x", 8, told)


def resumes(folder: Path, told: int) -> None:
    log(begin(folder, told, resume=True), "a", 4, told)


def saves(folder: Path, told: int) -> None:
    run = begin(folder, told, resume=True)
    source = folder.with_suffix(".yaml")
    source.write_bytes(SAVED)
    for _ in range(2):
        run.save(source, name="config.yaml")
        os.write(told, b"S")
    log(run, "a", 2, told)


def finishes(folder: Path, told: int) -> None:
    sys.executable = ""
    run = begin(folder, told)
    log(run, "a", 4, told)
    run.finish()
    os.write(told, b"F")


def has_three_journals(folder: Path) -> None:
    """The first of them is sealed."""
    sys.executable = ""
    told = os.open(f"{folder}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    run = begin(folder, told)
    assert run._writer is not None
    without_thread(run)
    for name in "xyz":
        log(run, name, 8, told)
        if name != "z":
            run._writer._rotate()
    seal.seal(run._writer.folder / "000001.jsonl")


def is_sealed_by_its_child(folder: Path, _: int) -> None:
    """As the child of a trainer that has died meanwhile."""
    (journal,) = folder.glob("r/*/000001.jsonl")
    sys.argv = ["-c", "", "0", str(journal.with_name("000002.jsonl")), str(journal)]
    seal.main()


def is_sealed_by_command(folder: Path, _: int) -> None:
    seal.KEEP_SEALED_S = 0
    for _ in range(2):  # the second time removes what the first has sealed
        with suppress(SystemExit):
            cli.main(["seal", str(folder)], standalone_mode=False)


WORKLOADS: dict[str, tuple[Callable[[Path], None], Callable[[Path, int], None]]] = {
    "begins": (nothing, begins),
    "rotates": (nothing, rotates),
    "resumes": (has_died, resumes),
    "saves": (has_died, saves),
    "finishes": (nothing, finishes),
    "is_sealed_by_its_child": (has_three_journals, is_sealed_by_its_child),
    "is_sealed_by_command": (has_three_journals, is_sealed_by_command),
}


# --- the programs


def in_a_process_of_its_own(work: Callable[[], object]) -> int:
    """Forked from this process, which has loaded all and begun nothing; returns how it ended, as waitpid tells."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        work()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)  # what was begun is not finished: the process has only ended


def steps(workload: str, root: Path, how: str) -> None:
    """Folder ROOT/<n>: died at step n / 2, before it (n even) or after it. Ends with the first that has no such step.

    `how`: "twice" for both, "once" for one of them in turn.
    """
    environment.describe = dict  # type: ignore[assignment] # it asks git, each time
    writer.SEAL_BYTES, writer.SYNC_EACH_S = 3000, 0.005
    prepare, work = WORKLOADS[workload]
    for number in count() if how == "twice" else (2 * step + step % 2 for step in count()):
        folder = root / str(number)
        if in_a_process_of_its_own(lambda: prepare(folder)):  # noqa: B023 - over before the next
            sys.exit("could not prepare")

        def die() -> None:
            told = os.open(f"{folder}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # noqa: B023
            die_at(number // 2, after=bool(number % 2))  # noqa: B023
            work(folder, told)  # noqa: B023

        status = in_a_process_of_its_own(die)
        if status == 0:
            return
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(f"step {number}: ended with {status}, not by its death")


def trainer(folder: Path, told: int, prefix: str, names: str) -> None:
    writer.SEAL_BYTES = 60_000
    log_in_threads(begin(folder, told, resume=True), prefix, names, sys.maxsize, told)


def sealers(folder: Path, told: int, first: int, each: int) -> None:
    """Each journal is sealed by a child that dies at its own step."""
    code, real = seal._CHILD, seal.start
    numbers = count(first, each)

    def start(*arguments: Any) -> Any:
        number = next(numbers)
        death = f"import mortal; mortal.die_at({number // 2}, after={number % 2 == 1}); "
        seal._CHILD = code.replace("from spool.seal", f"{death}from spool.seal")
        assert death in seal._CHILD
        return real(*arguments)

    seal.start = start
    writer.SYNC_EACH_S = 0.01
    run = begin(folder, told)
    assert run._writer is not None
    for name in "abcdef":
        log(run, name, 8, told)
        run._writer._rotate()
    run.finish()
    os.write(told, b"F")


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    if program == "trainer":
        trainer(Path(arguments[0]), int(arguments[1]), *arguments[2:])
    elif program == "steps":
        import spool.segment  # before any fork, so that it is loaded once

        steps(arguments[0], Path(arguments[1]), arguments[2])
    elif program == "sealers":
        sealers(Path(arguments[0]), *map(int, arguments[1:]))
