"""Every command and script in README and docs/ runs, or says why not.

The blocks of one page run in their order, in one empty folder, with our commands on PATH; consecutive Python is one script. What only a fresh clone can do
(make, git clone, pip install) is checked to exist. A block that cannot run here is preceded by `<!-- not run: why -->`.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sync.cli import main as sync_command

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"(?:<!-- *not run:(?P<excuse>.*?)-->\s*\n)?"
    r"^(?P<indent>[ \t]*)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
SETUP = re.compile(r"make\b|pip install\b|git clone\b|cd spool-sync\b")
SHELLS = {"bash", "sh", "console"}
PROSE = {"text", "json", "jsonl", "toml", "yaml", "sql", "mermaid"}


@dataclass(frozen=True)
class Block:
    language: str
    body: str
    excuse: str | None
    line: int

    def commands(self) -> list[str]:
        """Shell lines to run; a console block shows them behind `$ ` and their output below."""
        lines = self.body.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return "\n".join(lines).replace("\\\n", " ").splitlines()


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        body = "".join(line.removeprefix(match["indent"]) for line in match["body"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(match["language"].strip(), body, match["excuse"], line))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras() -> set[str]:
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([a-z]+) = \[", table, re.MULTILINE))


def is_checked_only(command: str) -> bool:
    """True for a command of the set-up, after checking what it names."""
    if not SETUP.match(command):
        return False
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        named = {word for word in words[1:] if "=" not in word}
        assert named <= make_targets(), f"the Makefile has no {named - make_targets()}"
    elif words[0] == "pip":
        named = {extra for word in words for listed in re.findall(r"\[(.+)\]", word) for extra in listed.split(",")}
        assert named <= extras(), f"pyproject.toml has no extra {named - extras()}"
    return True


def script_of(block: Block) -> list[str] | None:
    """The command that runs the block, or None where nothing is left to run."""
    if block.language == "python":
        return [sys.executable, "-c", block.body]
    lines = [line for line in block.commands() if not is_checked_only(line)]
    return ["bash", "-euo", "pipefail", "-c", "\n".join(lines)] if lines else None


def to_run(page: Path) -> list[Block]:
    """The blocks to run, in their order; Python blocks with nothing but prose between them are one script."""
    found: list[Block] = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language not in SHELLS | {"python"} or block.excuse is not None:
            continue
        if found and block.language == found[-1].language == "python":
            before = found.pop()
            block = Block("python", before.body + block.body, None, before.line)
        found.append(block)
    return found


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_both_readmes_are_among_the_pages() -> None:
    assert {"README.md", "README.zh.md"} <= {page_name(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path, bin_folder: Path) -> None:
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    for block in to_run(page):
        where = f"{page_name(page)}:{block.line}"
        script = script_of(block)
        if script is not None:
            script = ["timeout", "200", *script]  # ends what the script started too
            done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{where}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_a_block_names_its_language_and_an_excuse_its_reason(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        assert block.language in SHELLS | PROSE | {"python"}, f"{page_name(page)}:{block.line}: ```{block.language}"
        assert block.excuse is None or block.excuse.strip(), f"{page_name(page)}:{block.line}: not run, but why?"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_command_line_page_is_what_help_says(tmp_path: Path) -> None:
    written = tmp_path / "cli.md"
    subprocess.run([sys.executable, ROOT / "docs/write_cli.py", written], check=True)
    assert (ROOT / "docs/cli.md").read_text() == written.read_text(), "run `make docs`"


def test_blocks_are_found_with_their_excuse_and_their_commands() -> None:
    text = "a\n\n<!-- not run: serves -->\n```bash\nmlflow ui\n```\n\n1. b\n   ```console\n   $ echo a\n   x\n   ```\n"
    first, second = blocks(text)
    assert (first.language, first.excuse, first.line, first.commands()) == ("bash", " serves ", 4, ["mlflow ui"])
    assert (second.excuse, second.line, second.commands()) == (None, 9, ["echo a"])


def test_a_page_cannot_name_a_target_or_an_extra_that_is_not_there() -> None:
    assert is_checked_only("make demo")
    assert is_checked_only("pip install 'spool-sync[mlflow,trainer]'")
    assert not is_checked_only("spool ls  # make demo")
    with pytest.raises(AssertionError, match="nosuch"):
        is_checked_only("make nosuch")
    with pytest.raises(AssertionError, match="nosuch"):
        is_checked_only("pip install 'spool-sync[nosuch]'")


def test_messages_name_only_options_that_exist() -> None:
    options = {"--help", *(name for one in sync_command.params for name in one.opts)}
    named = set()
    for source in [*(ROOT / "spool").rglob("*.py"), *(ROOT / "sync").rglob("*.py"), *(ROOT / "trainer").rglob("*.py")]:
        for line in source.read_text(encoding="utf-8").splitlines():
            if "spool-sync" in line:
                named |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.partition("spool-sync")[2]))
    assert {"--to", "--run"} <= named
    assert named <= options


def test_every_test_that_the_guarantees_name_exists():
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`(?: \((slow)\))?", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 150
    for path, name, slow in named:
        text = (ROOT / path).read_text()
        found = re.search(rf"^(?P<marks>(?:@.*\n|    .*\n|\)\n|\]\n)*)def {name}\(", text, re.MULTILINE)
        assert found, f"{path}::{name}"
        assert ("pytest.mark.slow\n" in found["marks"]) == bool(slow), f"{path}::{name} is marked otherwise"
