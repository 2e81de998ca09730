"""`python -m bpf.services.compiler DIRECTORY`: compile, load and pin `services.c`.

Separate from the gate's compiler: it runs only where the proxy is used.
"""

import contextlib
import pathlib
import sys
from types import ModuleType
from typing import Any

from bpf import compiling, sources
from bpf.services import services
from bpf.services.links import HOOKS
from bpf.services.tables import MAPS

# Linux 5.18 (b44123b4a3dc): a rejected connect fails with ECONNREFUSED. Earlier kernels reject the
# program.
_VARIANTS: tuple[list[str], ...] = (["-DHAS_SET_RETVAL"], [])


def compile_and_pin(directory: pathlib.Path) -> None:
    """As `compiling.compile_and_pin`: the programs and their maps."""
    compiling.compile_and_pin(
        directory, services.PINS, _load, what="the proxy's programs", needs="Linux 5.10"
    )


def _load(bcc: ModuleType) -> tuple[Any, dict[str, int]]:
    """Load the first variant that the kernel accepts."""
    *better, last = _VARIANTS
    for flags in better:
        with contextlib.suppress(Exception):  # bcc raises plain Exception for all that fails
            return _load_variant(bcc, flags)
    return _load_variant(bcc, last)


def _load_variant(bcc: ModuleType, flags: list[str]) -> tuple[Any, dict[str, int]]:
    module = bcc.BPF(text=sources.expand("services.c"), cflags=["-Wall", "-Werror", *flags])
    loaded = {}
    for hook in HOOKS:
        function = module.load_func(hook.name.encode(), hook.type, attach_type=hook.attach_type)
        loaded[hook.name] = function.fd
    loaded |= {spec.name: module[spec.name].map_fd for spec in MAPS}
    return module, loaded


if __name__ == "__main__":
    sys.exit(compiling.main(lambda directory: compile_and_pin(pathlib.Path(directory))))
