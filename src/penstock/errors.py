"""Every error penstock raises, in one tree.

PenstockError
├── DataError           the data are wrong
│   ├── Corrupt             a structure or checksum is wrong
│   ├── Truncated           a file or range is shorter than its own metadata says
│   ├── Missing             a file, field or chunk that should be there is not
│   ├── SchemaMismatch      dtype, shape or fields differ from what was declared
│   ├── Unsafe              reading it would run code or leave the opened place
│   ├── LimitExceeded       larger than a limit that protects this process
│   └── DecodeFailed        a decoder refused the bytes
├── SourceError         the data could not be read
│   ├── Unavailable         the system refused or failed to read
│   └── Changed             the file is not the one that was opened
├── TransformFailed     the caller's own function raised, or broke its promise
├── WorkerDied          a thread or process ended without its result
├── BudgetExceeded      the plan does not fit the memory given
├── StateMismatch       a saved position belongs to other data or another order
├── ConvertFailed       a conversion stopped before its output was whole
└── ConfigError         an invalid argument (also a ValueError)
    ├── OutOfRange          a row that does not exist (also an IndexError)
    └── WrongArgument       an unknown argument, or one of the wrong type (also a TypeError)

Rules: each takes exactly one string, so that it pickles and so that torch's worker processes can rebuild it;
the string says what was expected, what was found, where, and the way out. What programs need is an attribute too,
which may be None. All are also names of ``penstock`` itself.
"""


class PenstockError(Exception):
    """Base of all errors raised by penstock."""


class DataError(PenstockError):
    """The data are wrong: damaged, missing, or not as declared."""


class Corrupt(DataError):
    """A structure or checksum of the file is wrong."""


class Truncated(DataError):
    """A file or range is shorter than its own metadata says."""


class Missing(DataError):
    """A file, field or chunk that should be there is not."""


class SchemaMismatch(DataError):
    """Dtype, shape or fields differ from what was declared or seen elsewhere."""


class Unsafe(DataError):
    """Reading this would run code, or leave the place that was opened."""


class LimitExceeded(DataError):
    """Larger than a limit that protects this process."""


class DecodeFailed(DataError):
    """A decoder refused the bytes."""


class SourceError(PenstockError):
    """The data could not be read."""


class Unavailable(SourceError):
    """The system refused or failed to read."""


class Changed(SourceError):
    """The file is not the one that was opened."""


class TransformFailed(PenstockError):
    """The caller's own function raised, or its result differs in kind from that of its trial run."""


class WorkerDied(PenstockError):
    """A thread or process ended without its result."""


class BudgetExceeded(PenstockError):
    """The plan does not fit the memory given."""

    def __init__(self, message: str = "", *, smallest_bytes: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        """The smallest ``memory`` that works, where it is known."""
        self.reason = reason
        """The part of the message that says what takes the memory, and what would help."""


class StateMismatch(PenstockError):
    """A saved position belongs to other data or another order."""


class ConvertFailed(PenstockError):
    """A conversion stopped before its output was whole."""


class ConfigError(PenstockError, ValueError):
    """An invalid argument."""


class OutOfRange(ConfigError, IndexError):
    """A row that does not exist."""


class WrongArgument(ConfigError, TypeError):
    """An unknown argument, or one of the wrong type."""


class CacheIsFull(UserWarning):
    """Files are read over the network from now on, because there is no room for copies."""


class KeptBatches(UserWarning):
    """Batches are being kept, so memory beyond the budget is in use on the caller's behalf."""


class FieldsLeftOut(UserWarning):
    """Files hold fields that cannot be delivered; the warning lists them, with reasons."""


class ReadersNotStarted(UserWarning):
    """Reader processes could not be started, so threads of this process read."""
