"""Machines that QEMU emulates."""

import dataclasses
import platform


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    """name: Debian's; machine: as uname(2) has it; elf: `e_machine` (elf(5)); package: with the
    emulator; options: of the emulator; kernel_options: of the kernel's command line."""

    name: str
    machine: str
    elf: int
    emulator: str
    package: str
    options: tuple[str, ...]
    kernel_options: str


ARCHITECTURES = {
    one.name: one
    for one in (
        Architecture(
            "amd64",
            "x86_64",
            62,
            "qemu-system-x86_64",
            "qemu-system-x86",
            ("-cpu", "max"),
            # A clock other than the TSC makes emulation slow.
            "console=ttyS0 tsc=reliable no5lvl",
        ),
        Architecture(
            "arm64",
            "aarch64",
            183,
            "qemu-system-aarch64",
            "qemu-system-arm",
            # It has no pointer authentication, which is slow to emulate.
            ("-machine", "virt", "-cpu", "neoverse-n1"),
            "console=ttyAMA0",
        ),
    )
}


def of_machine() -> Architecture:
    """This machine's."""
    (found,) = (one for one in ARCHITECTURES.values() if one.machine == platform.machine())
    return found
