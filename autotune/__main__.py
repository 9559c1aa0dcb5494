"""`python -m seqmoe.autotune`: the same as `seqmoe-tune`."""

from seqmoe.autotune.cli import main

if __name__ == "__main__":
    main()
