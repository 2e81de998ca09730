"""Program sets: the programs and maps of one main source file, which are loaded together."""

import dataclasses
from collections.abc import Collection

from bpf import map_specs, program_specs
from bpf.features import Feature


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A program as it is loaded, pinned as `name`.

    type: `enum bpf_prog_type`; attach_type: `enum bpf_attach_type`. is_optional: left out where the
    kernel rejects it. kernel_function, tracepoint: what a tracing program is attached to.
    """

    name: str
    function: str
    type: int
    attach_type: int = 0
    is_optional: bool = False
    kernel_function: str = ""
    tracepoint: str = ""

    @classmethod
    def hook(cls, hook: program_specs.HookSpec, *, is_optional: bool = False) -> "ProgramSpec":
        return cls(
            *(hook.name, hook.name, hook.type, hook.attach_type),
            *(is_optional, hook.kernel_function),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSet:
    """source: the main file in src/. features: macros of the sources, in the order of the kernel
    releases that brought them. needs: what the kernel must have, for messages.
    """

    source: str
    programs: tuple[ProgramSpec, ...]
    maps: tuple[map_specs.MapSpec, ...]
    needs: str
    features: tuple[Feature, ...] = ()

    def only(self, names: Collection[str]) -> "ProgramSet":
        """The set with these programs alone."""
        chosen = tuple(program for program in self.programs if program.name in names)
        return dataclasses.replace(self, programs=chosen)

    def feature_sets(self) -> list[tuple[Feature, ...]]:
        """One for each step of kernels: none, the first, the first two, and so on; and for each
        step the one without what lockdown forbids. Later ones have more.

        A kernel with later features and without an earlier one, by a backport, gets the step before
        that one.
        """
        steps = [self.features[:count] for count in range(len(self.features) + 1)]
        in_lockdown = [tuple(each for each in step if each.is_in_lockdown) for step in steps]
        return sorted(dict.fromkeys((*steps, *in_lockdown)), key=len)
