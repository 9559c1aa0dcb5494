"""The errors a user can meet: each is one line that says what, where and what would be right, with its exit code."""


class SeqmoeError(Exception):
    """Base of every error meant for the user's eyes. `exit_code` is what the command line tools return."""

    exit_code = 1


class UsageError(SeqmoeError):
    """An option, a value or a combination that cannot be right (exit 2, as click's own usage errors)."""

    exit_code = 2


class BudgetError(SeqmoeError):
    """The memory budget cannot hold even the smallest working set; the message names the smallest that works."""

    exit_code = 4


class ProfileError(SeqmoeError):
    """A profile that cannot be read, has unknown keys, or was made for another model."""

    exit_code = 5


class CheckpointError(SeqmoeError):
    """A checkpoint that is missing, truncated, inconsistent, or of a kind that is not supported (named, with the reason)."""

    exit_code = 6


class LinkError(SeqmoeError):
    """Bytes that could not be read while the model was running; no token that depended on them was returned."""

    exit_code = 7


class DiskSpaceError(SeqmoeError):
    """Not enough room on a disk for what had to be written; nothing half-written is left."""

    exit_code = 8
