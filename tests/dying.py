"""A command of `spool` killed before each of its durable steps in turn, in processes of its own.

python dying.py TEMPLATE FIRST EACH WORD …     `{}` in a word is the number of the step that is not reached
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import mortal

from spool import cli


def kill_at_steps(*words: object, template: Path | None = None, first: int = 0, each: int = 1) -> Sequence[int]:
    """Run `spool WORDS` again and again, killed before step `first`, `first + each`, …; returns these numbers.

    `template` is copied to the second word, the spool, each time. The last run, with steps enough, must end well.
    """
    arguments = [str(template or ""), str(first), str(each), *map(str, words)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return range(first, int(done.stdout.split()[-1]), each)


def _run(step: int, template: str, words: list[str]) -> None:
    words = [word.replace("{}", str(step)) for word in words]
    if template:
        shutil.copytree(template, words[1])
    mortal.die_at(step, after=False)
    with suppress(SystemExit):  # as click ends without an error
        cli.main(words, standalone_mode=False)


def main() -> None:
    import spool.compact
    import spool.segment  # noqa: F401 - loaded once, before any fork

    template, step, each, *words = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
    while status := mortal.in_a_process_of_its_own(partial(_run, step, template, words)):
        if not os.WIFSIGNALED(status):
            sys.exit(f"step {step}: ended with {status}, not by its death")
        step += each
    print(step)


if __name__ == "__main__":
    main()
