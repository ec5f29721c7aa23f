"""`spool-sync --follow`: every run of a spool, and those that begin later, until it is asked to end.

Polling, since network file systems send no events, and since it is cheap enough everywhere
(`docs/decisions/0004-polling.md`): a live run is looked at four times a second while records come, twice a second otherwise; of
a run that is over only its folder's time is asked for. A run that fails waits longer and longer, and holds up no other.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from spool import cursor, format, layout, status
from spool.errors import SpoolError
from sync.errors import StoppedError, SyncError
from sync.live import LiveRun, Terms
from sync.patience import back_off_s
from sync.report import RunReport

_ACTIVE_S, _IDLE_S, _SILENT_S = 0.25, 0.5, 30.0
_SILENT_AFTER_S = 3600.0
_ATTEMPTS_S = 2.0
_LIST_EACH_S = 10.0


@dataclass
class _Followed:
    live: LiveRun
    due_s: float = 0.0
    grew_at_s: float = 0.0
    failures: int = 0
    problem: str = ""
    report: RunReport | None = None
    """Of the replay that found the run to be over."""
    folder_ns: int = 0
    """When the run's folder had changed last, as it was over: a new attempt changes it again."""
    future: "Future[tuple[int, RunReport | None]] | None" = None


class Follow:
    """The runs of a spool at one destination."""

    def __init__(
        self,
        root: Path,
        terms: Terms,
        is_meant: Callable[[Path], bool],
        tell: Callable[[str, RunReport | None, str], None],
        jobs: int,
        stop: Event,
    ) -> None:
        """`tell(run id, report, sentence)` is called from this thread as a run is done, fails, or goes on after a failure."""
        self._root, self._terms, self._is_meant, self._tell, self._stop = root, terms, is_meant, tell, stop
        self._jobs = jobs
        self._runs: dict[str, _Followed] = {}
        self._live: dict[str, _Followed] = {}
        """Those of the runs that are not known to be over."""
        self._others: set[str] = set()
        self._listed_ns, self._listed_at_s = -1, -_LIST_EACH_S

    def run(self, each_look: Callable[[], None] = lambda: None) -> None:
        """Until `stop` is set: then what is in hand is finished and the runs are left in order."""
        attempts_due_s = 0.0
        with ThreadPoolExecutor(self._jobs) as pool:
            while not self._stop.is_set():
                self._list()
                now_s = time.monotonic()
                if now_s >= attempts_due_s:
                    attempts_due_s = now_s + _ATTEMPTS_S
                    self._look_for_attempts(now_s)
                for followed in list(self._live.values()):
                    if followed.future is not None:
                        if followed.future.done():
                            self._take(followed, followed.future)
                    elif followed.due_s <= now_s:
                        followed.future = pool.submit(followed.live.look)
                each_look()
                self._stop.wait(_ACTIVE_S)
            for followed in list(self._live.values()):
                if followed.future is not None:
                    self._take(followed, followed.future)
                with suppress(SyncError, SpoolError, OSError):  # it was not reached before either, and has been told
                    followed.live.close()

    def _list(self) -> None:
        now_s = time.monotonic()
        try:
            changed_ns = self._root.stat().st_mtime_ns
        except FileNotFoundError:  # the trainer has not begun yet
            return
        if changed_ns == self._listed_ns and now_s - self._listed_at_s < _LIST_EACH_S:
            return
        self._listed_ns, self._listed_at_s = changed_ns, now_s
        new = [one for one in layout.runs(self._root) if one.name not in self._runs and one.name not in self._others]
        cursors = cursor.by_run(self._terms.folder, self._terms.destination.label.lower()) if new else {}
        for path in new:
            if not self._is_meant(path):
                self._others.add(path.name)
                continue
            followed = _Followed(LiveRun(path, self._terms), grew_at_s=now_s)
            self._runs[path.name] = self._live[path.name] = followed
            if self._is_proven(path, cursors.get(path.name, [])):
                self._set_over(followed)

    def _set_over(self, followed: _Followed) -> None:
        del self._live[followed.live.path.name]
        with suppress(FileNotFoundError):  # removed by gc
            followed.folder_ns = followed.live.path.stat().st_mtime_ns

    @staticmethod
    def _is_proven(path: Path, cursors: list[cursor.Cursor]) -> bool:
        """Whether an earlier sync has proven all of a run that is over to be there: a restart need not ask for all of it again."""
        glances = layout.glance(path)
        if status.why_not_over(glances) is not None:
            return False
        state = status.status_of(glances).state
        for one in cursors:
            reached = all(
                one.delivered.get(writer.path.name, {}).get(table, 0) >= writer.last.seq
                for writer in glances
                for table in format.TABLES
            )
            if reached and one.status == state and not one.waiting:
                return True
        return False

    def _take(self, followed: _Followed, future: "Future[tuple[int, RunReport | None]]") -> None:
        """What a look has brought."""
        followed.future = None
        now_s = time.monotonic()
        run_id = followed.live.path.name
        try:
            delivered, report = future.result()
            problem = report.problem if report is not None else ""
        except StoppedError:
            return
        except (SyncError, SpoolError, OSError) as error:
            delivered, report, problem = 0, None, str(error)
        if report is not None:
            followed.report = report
        if problem:
            if problem != followed.problem:
                self._tell(run_id, report, problem)
            followed.problem = problem
            followed.due_s = now_s + back_off_s(followed.failures)
            followed.failures += 1
            return
        if followed.problem:
            self._tell(run_id, None, "goes on")
        followed.failures, followed.problem = 0, ""
        if report is not None:
            self._set_over(followed)
            self._tell(run_id, report, "")
            return
        if delivered:
            followed.grew_at_s = now_s
        is_silent = now_s - followed.grew_at_s > _SILENT_AFTER_S
        followed.due_s = now_s + (_ACTIVE_S if delivered else _SILENT_S if is_silent else _IDLE_S)

    def _look_for_attempts(self, now_s: float) -> None:
        """A new writer in a run that was over makes it live again."""
        for run_id, followed in self._runs.items():
            if run_id not in self._live:
                with suppress(FileNotFoundError):  # removed by gc
                    if followed.live.path.stat().st_mtime_ns != followed.folder_ns:
                        followed.grew_at_s, followed.due_s = now_s, 0.0
                        self._live[run_id] = followed

    @property
    def problems(self) -> dict[str, str]:
        """run -> why it is not delivered at the moment."""
        return {run_id: one.problem for run_id, one in self._runs.items() if one.problem}

    @property
    def reports(self) -> list[RunReport]:
        """Of the runs that were over."""
        return [one.report for one in self._runs.values() if one.report is not None]

    def standing(self) -> dict[str, int]:
        """For a health file: how many runs are live, over, and failing, and how many rows have gone out."""
        runs = self._runs.values()
        return {
            "live": len(self._live),
            "over": len(self._runs) - len(self._live),
            "failing": len(self.problems),
            "rows": sum(one.live.rows for one in runs),
        }
