"""`python -m sync` is `spool-sync`."""

from sync.cli import main

if __name__ == "__main__":
    main()
