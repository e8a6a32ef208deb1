"""The exceptions and warnings that callers may catch.

    EchoReduceError
    ├── ConfigError (ValueError)          a setting is out of range or two settings contradict each other
    ├── ShapeError (ValueError)           one tensor's shape or layout does not fit the call
    ├── DTypeError (TypeError)            the tensor's dtype cannot be reduced
    ├── GroupError (RuntimeError)         the process group is missing, closed, or this rank is not in it
    │   └── BackendUnavailable            the requested backend cannot run here (the reason is in the text)
    ├── MismatchError (RuntimeError)      ranks called with different shapes, dtypes or configurations
    ├── PeerError (RuntimeError)          a peer died or did not arrive within the timeout
    ├── PassError (RuntimeError)          a session is used wrongly: too many sites, concurrent use, no open pass
    └── CheckError (RuntimeError)         a self-check (bench, check, simulate) found a wrong result

    EchoReduceWarning (UserWarning)       something was replaced by something slower or coarser, or is known to do harm

Every exception is also a subclass of the built-in named in parentheses, so that code which catches only built-ins works.
Internal faults are plain `assert` statements with a text.
"""

from __future__ import annotations


class EchoReduceError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(EchoReduceError, ValueError):
    """A setting is out of range, or two settings contradict each other; the bad value is quoted."""


class ShapeError(EchoReduceError, ValueError):
    """One tensor's shape or memory layout does not fit the call."""


class DTypeError(EchoReduceError, TypeError):
    """The tensor's dtype cannot be reduced in low precision; the text names it and the accepted ones."""


class GroupError(EchoReduceError, RuntimeError):
    """The process group is missing, closed, or does not contain this rank."""


class BackendUnavailable(GroupError):
    """The requested backend cannot run here; the text gives the reason that every rank agreed on."""


class MismatchError(EchoReduceError, RuntimeError):
    """Ranks of one call disagree in shape, dtype or configuration; raised on every rank with the same text."""


class PeerError(EchoReduceError, RuntimeError):
    """A peer died or did not arrive within the timeout.

    Attributes:
        ranks: group ranks that did not answer; empty when it could not be found out.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class PassError(EchoReduceError, RuntimeError):
    """A session is used wrongly: too many sites in a pass, concurrent use, or no open pass."""


class CheckError(EchoReduceError, RuntimeError):
    """A self-check found a wrong result; the text gives the first bad index."""


class EchoReduceWarning(UserWarning):
    """Something was replaced by something slower or coarser, or a configuration is known to do harm."""
