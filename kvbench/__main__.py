"""`python -m kvbench`."""

from kvbench.cli import main

main()
