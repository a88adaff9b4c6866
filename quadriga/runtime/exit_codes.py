"""Exit codes of the launcher, as docs/reliability.md lists them, and of its children."""

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_START_FAILED = 3
EXIT_CHILD_DIED = 4
EXIT_FORCED = 5
EXIT_LAUNCHER_DIED = 6
