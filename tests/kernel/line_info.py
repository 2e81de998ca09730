"""The C files of a program, by the kernel: `python -m tests.kernel.line_info FUNCTION`.

podgate loads its programs without BTF. bcc loads the same function with it, so the kernel has the
file of each instruction, also of functions that are inlined.
"""

import json
import pathlib
import subprocess
import sys

from bpf import compiling, features, host_egress, loader, sources


def files_of(function: str) -> list[str]:
    """The files of the function's instructions, in the order of their first ones.

    In a process of its own, since bcc maps 250 MB.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel.line_info", function],
        cwd=pathlib.Path(__file__).parents[2],
        check=True,
        stdout=subprocess.PIPE,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def _files(descriptor: int) -> list[str]:
    lines = pathlib.Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    (number,) = (line.split()[1] for line in lines if line.startswith("prog_id:"))
    done = subprocess.run(
        ["bpftool", "--json", "prog", "dump", "xlated", "id", number, "linum"],
        check=True,
        stdout=subprocess.PIPE,
    )
    found = [line["file"] for line in json.loads(done.stdout) if "file" in line]
    return [f"bpf/src/{pathlib.PurePath(file).name}" for file in dict.fromkeys(found)]


def main() -> None:
    """Print the list as JSON."""
    bcc = compiling.import_bcc()
    (programs, program) = next(
        (programs, program)
        for programs in (loader.PROGRAM_SET, host_egress.PROGRAM_SET)
        for program in programs.programs
        if program.name == sys.argv[1]
    )
    flags = features.compiler_flags(programs.features, features.offered(programs.features))
    flags = [*compiling.FLAGS, *flags, "-DWITH_LINES"]
    module = bcc.BPF(text=sources.expand(programs.source), cflags=flags)
    name, attach_type = program.name.encode(), program.attach_type or -1
    function = module.load_func(name, program.type, attach_type=attach_type)
    json.dump(_files(function.fd), sys.stdout)


if __name__ == "__main__":
    main()
