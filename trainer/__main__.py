"""A small, real GRPO trainer: `python -m trainer [--config file.yaml] [a.b.c=value ...]`.

A tiny transformer learns chained arithmetic with a calculator, in Ray actors, on CPU. It differs from what one would run on a
cluster in size only: configuration, metrics, traces and checkpoints have verl's names, and it records itself with `spool` as
any user's trainer would.

    config      keys, defaults, refusals            loop        the training, step by step
    tokenizer   characters                          workers     Ray actors, or this process
    model       tiny GPT                            rollout     one worker
    tasks       chained arithmetic, its reward      decoder     batched decoding
    data        files of problems                   agent_loop  one trajectory
    tools       the calculator                      learner     warm-up and update
    algo        GRPO as functions                   metrics     verl's names
    checkpoint  save, resume                        ledger      recording, and its independent list
"""

import sys

from trainer.config import ConfigError, default, keys, load

_USAGE = """usage: python -m trainer [--config FILE.yaml] [KEY=VALUE ...]

Trains a tiny transformer by GRPO. Keys have verl's names; KEY=VALUE wins over FILE.yaml. Records go to the spool in
SPOOL_DIR (default: ./spool-data). Exit code 1: wrong key, value, file or folder, told in one sentence.

Keys, their defaults and meanings:
"""


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(_USAGE + describe_keys())
        return 0
    try:
        path, overrides = split_arguments(arguments)
        config = load(path, overrides)
    except ConfigError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1

    # After the configuration is known to be right: torch takes seconds to load.
    import spool
    from trainer.checkpoint import CheckpointError
    from trainer.data import DataError
    from trainer.loop import fit
    from trainer.workers import WorkersError

    try:
        fit(config)
    except KeyboardInterrupt:
        print("trainer: interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    except (CheckpointError, DataError, WorkersError, spool.SpoolError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Return the file behind `--config`, if there is one, and the overrides. Raises `ConfigError`."""
    path, overrides = None, []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--config" or argument.startswith("--config="):
            path = argument.partition("=")[2] or next(rest, "")
            if not path:
                raise ConfigError("--config needs a file")
        elif argument.startswith("-"):
            raise ConfigError(f"unknown option {argument!r}; options are --config FILE.yaml and --help")
        else:
            overrides.append(argument)
    return path, overrides


def describe_keys() -> str:
    """Return a line per key: its name and default, and below it what it means."""
    lines = []
    for name, entry in keys().items():
        value = default(entry)
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        choices = [str(choice) for choice in entry.metadata["choices"] if choice is not None]
        meaning = entry.metadata["meaning"] + (f" [{' | '.join(choices)}]" if choices else "")
        lines.append(f"  {name}={shown}\n      {meaning}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
