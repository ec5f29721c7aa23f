"""Arguments and options that several commands of `spool` share."""

from pathlib import Path

import click

spool_argument = click.argument(
    "spool", envvar="SPOOL_DIR", default="spool-data", type=click.Path(path_type=Path), metavar="[SPOOL]"
)
run_option = click.option(
    "--run", "names", multiple=True, metavar="RUN", help="Only these runs: id, prefix, glob or project/experiment."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of text.")
state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where cursors and accepted damage are kept; by default SPOOL/.sync.",
)
