"""The ways a user's run can go wrong, as exceptions with sentences.

Every message names the value, the accepted set and the next step; the command line prints it without a
traceback and exits with the class's `exit_code`.
"""


class KvbenchError(Exception):
    """Base of every error that kvbench raises on purpose."""

    exit_code = 3


class UsageError(KvbenchError):
    """A bad matrix, gate, option or path: the user's to mend (exit code 2)."""

    exit_code = 2


class Refused(KvbenchError):
    """A cell that may not run as asked. reason: a short stable word, such as `mla_not_validated`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NotAvailable(KvbenchError):
    """Data or a tool that was asked for is not here; the message holds the command that gets it."""


NO_DEVICE = "no_cuda_device"  # the reason of `Refused` that other code looks for
