"""The errors that the scripts expect: each ends the run with one line instead of a traceback."""
import math


class UsageError(Exception):
    """The command cannot be carried out. Every rank detects this; exit code 2."""

    exit_code = 2


class RunError(Exception):
    """The run failed for a reason that every rank detects, such as a loss that is not finite; exit code 1."""

    exit_code = 1


class ProcessError(RunError):
    """The run failed for a reason that only this process knows, such as an unreadable file; exit code 1."""


def require_finite(value: float, what: str) -> None:
    """Raise RunError if `value`, equal on all ranks, is not finite; `what` names it, such as "step 2: the loss"."""
    if not math.isfinite(value):
        raise RunError(f"{what} is {value}; lower --lr, or check the data")


def reason(error: BaseException) -> str:
    """Return why an operation failed, in a few words: an OSError's own text, or the first line of the message."""
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
