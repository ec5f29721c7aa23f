"""Runs delivered, compared or planned once each, some at a time."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from spool.errors import SpoolError
from spool.reader import RunReader
from sync.engine import Replay
from sync.errors import StoppedError, UnreachableError
from sync.live import Terms
from sync.report import RunReport

_NOT_TRIED = "not tried: "


def each(
    runs: list[RunReader],
    terms: Terms,
    jobs: int,
    act: Callable[[Replay], None],
    is_there: Callable[[], bool],
    done: Callable[[RunReport], None],
) -> list[RunReport]:
    """Do `act` for every run; the reports in the order of the runs, `done` as each of them is there.

    Where one run fails and the destination does not answer at all any more (`is_there`), the others are not tried.
    """
    gave_up = Event()
    why = ""

    def one(run: RunReader) -> RunReport:
        nonlocal why
        if gave_up.is_set():
            return RunReport(run.id, terms.destination.label, problem=_NOT_TRIED + why)
        report = RunReport(run.id, terms.destination.label)
        try:
            replay = terms.replay(run)
            report = replay.report
            act(replay)
        except (UnreachableError, StoppedError) as error:  # the report says it as well
            if isinstance(error, StoppedError) or not is_there():
                why = str(error)
                gave_up.set()
        except (SpoolError, OSError) as error:  # of this run: the others go on
            report.problem = str(error)
        done(report)
        return report

    gc.freeze()  # what the SDK consists of stays for good: without this, a quarter of a replay's time goes into going through it
    with ThreadPoolExecutor(max(1, min(jobs, len(runs)))) as pool:
        return list(pool.map(one, runs))
