"""`spool gc`: the removal of runs that every destination named is proven to hold. The one thing that deletes what was recorded.

A run goes in steps, each durable before the next, so that a kill between any two of them loses nothing and is made good
by the next gc:

1. proven: it is over, nothing in it is damaged, and the cursors of all destinations cover every record;
2. looked at again under the claims that keep a sync out, and renamed to `.trash-<run>-<fingerprint>`: nobody finds it any more;
3. looked at once more there: a process that resumed it just before the rename has left something, and then it is put back;
4. its run.json removed, from when on it is no run; then everything else.

Cursors stay: they are small, and tell later what was delivered where. Symbolic links are never followed: a run that is or
holds one stays.
"""

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from spool import acceptance, claim, cursor, files, format, layout, status
from spool.catalog import RunFolder
from spool.errors import RemoveError

_TRASH_NAME = re.compile(r"\.trash-(.+)-([0-9a-f]{16})")
_LINK = "is a symbolic link, and what that leads to is not the spool's"


@dataclass(frozen=True)
class Conditions:
    """When a run may go."""

    destinations: tuple[str, ...]
    state: Path
    """Folder of the cursors of these destinations."""
    ended_before_ns: int


@dataclass
class Verdict:
    """What is known of one run; it may go when nothing is in `why`."""

    run: RunFolder
    size_bytes: int
    fingerprint: str
    why: str = ""
    delivered_to: dict[str, list[str]] = field(default_factory=dict)
    """destination -> its own names for the run"""
    last_seqs: dict[str, int] = field(default_factory=dict)


def judge(run: RunFolder, conditions: Conditions) -> Verdict:
    """Whether a run may go, and if not, why. Reads every byte of one for which nothing cheaper speaks against it."""
    if run.path.is_symlink():
        return Verdict(run, 0, "", f"it {_LINK}")
    verdict = Verdict(run, layout.size_bytes(run.path), layout.fingerprint(run.path))
    verdict.why = _why_kept(run, conditions) or _why_unsettled(run, conditions) or _why_unproven(verdict, conditions)
    return verdict


def _why_kept(run: RunFolder, conditions: Conditions) -> str:
    """What speaks against removal at once, but for the records themselves."""
    links = layout.links(run.path)
    if links:
        return f"{links[0].name} in it {_LINK}"
    if run.info_damage:
        return str(run.info_damage[0])
    writers = layout.glance(run.path)
    open_reason = status.why_not_over(writers)
    if open_reason:
        return open_reason
    if (status.status_of(writers).end_ns or 0) > conditions.ended_before_ns:
        return "it ended too recently"
    for path in _claims(run, conditions):
        holder = claim.holder(path)
        if holder:
            return f"{holder} is delivering it to {path.parent.name}"
    return ""


def _claims(run: RunFolder, conditions: Conditions) -> list[Path]:
    """Where a sync claims the run: of the destinations named, and of any other that has done so in the same state folder."""
    taken = [path for pattern in claim.patterns(run.id) for path in conditions.state.glob(f"*/{pattern}")]
    named = [conditions.state / name / claim.file_name(run.id) for name in conditions.destinations]
    return sorted({*taken, *named})


def _why_unsettled(run: RunFolder, conditions: Conditions) -> str:
    """What the cursors say as a whole. All of a destination's count: nobody here knows which of its runs there is meant."""
    state = run.status().state
    for name in conditions.destinations:
        found = cursor.of_run(conditions.state, name, run.id)
        if not found:
            return f"{name} has not got it"
        for one in found:
            if any(places for tables in one.rejected.values() for places in tables.values()):
                return f"{name} run {one.identity} has rejected records"
            if one.status != state or one.waiting:
                return (
                    f"{name} run {one.identity} is not proven to hold it as {state}: run `spool-sync --to {name}` again, "
                    f"or remove {one.path} if that run is of no interest"
                )
    return ""


def _why_unproven(verdict: Verdict, conditions: Conditions) -> str:
    from spool.reader import RunReader

    run = RunReader(verdict.run.path)
    writers = run.writers()
    accepted = acceptance.load(conditions.state, run.path)
    damage = [one for one in run.damage(writers) if one not in accepted]
    if damage:
        return f"{damage[0]}; `spool verify` lists all, and --accept acknowledges it"
    verdict.last_seqs = {writer.id: writer.last_seq for writer in writers}
    why = _why_undelivered(verdict, conditions)
    if not why:
        verdict.delivered_to = {
            name: [one.identity for one in cursor.of_run(conditions.state, name, run.id)]
            for name in conditions.destinations
        }
    return why


def _why_undelivered(verdict: Verdict, conditions: Conditions) -> str:
    for name in conditions.destinations:
        for one in cursor.of_run(conditions.state, name, verdict.run.id):
            for writer, last_seq in verdict.last_seqs.items():
                reached = min(one.delivered.get(writer, {}).get(table, 0) for table in format.TABLES)
                if reached < last_seq:
                    return f"{name} run {one.identity} has {reached} of {last_seq} records of {writer}"
    return ""


def remove(verdict: Verdict, conditions: Conditions) -> None:
    """Remove a run that may go. Raises RemoveError when it may not any more: then it is where it was."""
    run = verdict.run
    with ExitStack() as claims:
        for path in _claims(run, conditions):
            taken = claim.take(path)
            if isinstance(taken, str):
                raise RemoveError(f"{run.path}: stays, {taken} has begun to deliver it")
            claims.callback(taken.release)
        why = _why_unsettled(run, conditions) or _why_undelivered(verdict, conditions)
        if why or layout.fingerprint(run.path) != verdict.fingerprint:
            raise RemoveError(f"{run.path}: stays, {why or 'it has changed since it was looked at'}")
        trash = run.path.with_name(f".trash-{run.path.name}-{verdict.fingerprint}")
        files.rename_new(run.path, trash)
        files.sync_folder(run.path.parent)
        finish(trash)


def leftovers(root: Path) -> list[Path]:
    """What a killed gc has renamed and not removed."""
    return sorted(
        root / entry.name
        for entry in os.scandir(root)
        if _TRASH_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )


def finish(trash: Path) -> None:
    """Remove a run that was renamed, or put it back where it is not what was proven. Raises RemoveError in that case."""
    match = _TRASH_NAME.fullmatch(trash.name)
    assert match is not None  # noqa: S101 - the caller has named or found it so
    name, fingerprint = match.groups()
    run_file = trash / format.RUN_FILE
    if run_file.is_file():
        if layout.fingerprint(trash) != fingerprint:
            _put_back(trash, trash.with_name(name))
        # Durable before anything else goes: what has no run.json any more has been found to be what was proven.
        files.remove(run_file)
    files.remove(trash)


def _put_back(trash: Path, path: Path) -> None:
    try:
        files.rename_new(trash, path)
    except FileExistsError as error:
        raise RemoveError(
            f"{trash}: was written to while it was removed, and a new run has its name; nothing of it is removed: rename it"
        ) from error
    files.sync_folder(path.parent)
    raise RemoveError(f"{path}: stays, something was written into it while it was removed")
