"""Several destinations at once: a process for each, so that one that hangs or fails does not slow another."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO, Any

_PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sync.cli import main; main(prog_name='spool-sync')"
"""Our own package comes first, whatever the current folder holds."""
_WORST = (0, 1, 2, 3, 4)


def run(destinations: list[str], arguments: list[str]) -> list[tuple[str, int, str]]:
    """`spool-sync --to ONE …` for each; (destination, exit code, what it printed). Their stderr comes out with the name before it.

    SIGINT and SIGTERM go on to all of them.
    """
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parent.parent)]
    children = [
        subprocess.Popen([*command, "--to", one, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for one in destinations
    ]

    def pass_on(number: int, _: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    earlier = {one: signal.signal(one, pass_on) for one in (signal.SIGINT, signal.SIGTERM)}
    printed: dict[int, str] = {}
    threads = [Thread(target=_read, args=(at, child.stdout, printed)) for at, child in enumerate(children)]
    threads += [
        Thread(target=_repeat, args=(name, child.stderr)) for name, child in zip(destinations, children, strict=True)
    ]
    for thread in threads:
        thread.start()
    codes = [child.wait() for child in children]
    for thread in threads:
        thread.join()
    for number, handler in earlier.items():
        signal.signal(number, handler)
    return [(name, code, printed[at]) for at, (name, code) in enumerate(zip(destinations, codes, strict=True))]


def worst(codes: list[int]) -> int:
    """4 > 3 > 2 > 1 > 0; a process that a signal has killed counts as not delivered."""
    return max(code if code in _WORST else 4 for code in codes)


def merged(outcomes: list[tuple[str, int, str]]) -> dict[str, Any]:
    """The JSON of all of them as one."""
    found = []
    for name, code, text in outcomes:
        found.append({"destination": name, "exit_code": code, **(json.loads(text) if text.strip() else {})})
    return {"destinations": found, "exit_code": worst([code for _, code, _ in outcomes])}


def _read(at: int, stream: IO[str], printed: dict[int, str]) -> None:
    printed[at] = stream.read()


def _repeat(name: str, stream: IO[str]) -> None:
    for line in stream:
        sys.stderr.write(f"{name}: {line}" if not line.startswith("{") else line)
