"""What a sync says on stderr while it works: sentences for people, or one JSON object a line for machines."""

import sys
import time
from typing import Any

import click
import orjson


class Voice:
    def __init__(self, *, is_json: bool = False, is_quiet: bool = False) -> None:
        """`is_quiet`: only what is wrong is said."""
        self._is_json, self.is_quiet = is_json, is_quiet

    def say(self, text: str, *, is_wrong: bool = False, **fields: Any) -> None:
        """`fields` are for machines: run, destination, counts."""
        if self.is_quiet and not is_wrong:
            return
        if self._is_json:
            line = {"ts_ns": time.time_ns(), "level": "error" if is_wrong else "info", "message": text, **fields}
            sys.stderr.write(orjson.dumps(line).decode() + "\n")
            sys.stderr.flush()
        else:
            click.echo(text, err=True)
