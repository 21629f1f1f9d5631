"""`python -m kvbench`."""

from kvbench.cli.main import main

main()
