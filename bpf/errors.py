"""Why these exist: the agent turns each into one sentence for the operator or one condition."""


class BpfError(OSError):
    """bpf(2) refused. `errno` is the kernel's; the message says what was tried."""


class PinError(Exception):
    """What is pinned is not what this version expects, or nothing can be pinned here."""


class CompileError(Exception):
    """The programs could not be compiled or loaded; the message carries the compiler's reason."""


class AttachError(Exception):
    """An interface could not be gated or released."""
