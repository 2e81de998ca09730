"""Errors of this package, each with a text of one sentence; every class is caught somewhere."""


class KernelSideError(Exception):
    """Base of the errors whose text is for the user."""


class BpfError(KernelSideError, OSError):
    """bpf(2) failed. `errno` is the kernel's; the text names the operation."""


class PinError(KernelSideError):
    """A pinned object is not what this version expects, or pinning is impossible."""


class CompileError(KernelSideError):
    """The programs could not be compiled or loaded; the text has the compiler's reason."""


class AttachError(KernelSideError):
    """A gate could not be attached or detached."""
