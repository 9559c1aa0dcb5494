"""`python -m seqmoe.runtime`: the same as `seqmoe-run`."""

from seqmoe.runtime.cli import main

main()
