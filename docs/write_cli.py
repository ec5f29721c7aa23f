"""Writes docs/cli.md from the `--help` of `spool` and `spool-sync` and of every command below them: `make docs`."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

import spool.cli
import sync.cli

HEAD = """<!-- Written by `make docs` from --help; a change made here is lost. -->

# Command line
"""
WIDTH = 100


def sections(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[str]:
    """One Markdown section for the command and each below it, in the order in which --help lists them."""
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    help_lines = (line.rstrip() for line in command.get_help(context).splitlines())
    yield f"## {context.command_path}\n\n```text\n" + "\n".join(help_lines).strip() + "\n```\n"
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            if child is not None and not child.hidden:
                yield from sections(child, child_name, context)


def page() -> str:
    """The whole of docs/cli.md."""
    return "\n".join([HEAD, *sections(spool.cli.main, "spool"), *sections(sync.cli.main, "spool-sync")])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
