"""The exceptions of driftless."""


class Error(Exception):
    """Something that driftless was asked for and did not do. Its text says what, where and what to do.

    Attributes:
        code: the exit code that the command ``driftless`` has for it. 1: failed, and the state on disk is intact;
            2: the call is wrong; 3: something stored is damaged, unsigned or of another run, and nothing of it was used;
            4: a peer did not answer in time; 5: an engine is left paused.
        retryable: whether the same call may succeed later.
        kind: the name of the error in the Rust crates, such as ``LayoutChanged``.
        tensor: the tensor that it is about, or None.
    """

    def __init__(
        self, text: str, *, kind: str = "", code: int = 1, retryable: bool = False, tensor: str | None = None
    ) -> None:
        super().__init__(text)
        self.kind = kind
        self.code = code
        self.retryable = retryable
        self.tensor = tensor

    def __reduce__(self):
        return (_again, (type(self), str(self), self.kind, self.code, self.retryable, self.tensor))


def _again(cls, text, kind, code, retryable, tensor):
    """An exception that came from another process."""
    return cls(text, kind=kind, code=code, retryable=retryable, tensor=tensor)


class UsageError(Error, ValueError):
    """An argument that cannot be. Nothing was done."""


class TensorError(Error, ValueError):
    """A tensor that cannot be published: its device, layout, element type, or content that changed meanwhile."""


class LayoutChangedError(TensorError):
    """The tensors are not those of the version before, by name, shape or type: some were lost, added or renamed.

    ``allow_layout_change=True`` publishes them in full.
    """


class NotFiniteError(TensorError):
    """Elements are NaN or infinite. ``allow_non_finite=True`` publishes them."""


class RunError(Error):
    """The run is not there, or its name is taken, or another publisher was faster, or ranks contradict each other."""


class StoreError(Error, OSError):
    """A store or a file system failed, or said no."""


class RefusedError(Error):
    """Something stored is damaged, unsigned or of another run. Nothing of it was used (code 3)."""


class DeadlineError(Error, TimeoutError):
    """A store, a rank or an engine did not answer in time (code 4)."""


class EngineError(Error):
    """An engine failed, or cannot be used."""


class BusyError(Error):
    """Something is in use by another call or another process; the same call may succeed later."""


class CancelledError(Error):
    """The call was ended by ``cancel()`` or by the end of the interpreter. Nothing was committed."""


class ClosedError(Error):
    """The object was closed."""


class ForkedError(Error):
    """The object belongs to the process that this one was forked from. Open one here."""
