"""`python -m nanoskyrl_cli` is `skyrl`."""

from nanoskyrl_cli.main import main

main()
