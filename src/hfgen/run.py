"""``python -m hfgen.run script.py …`` or ``-m module …``: runs a program whose models generate with hfgen."""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType, TracebackType

import hfgen  # its names import torch when they are used: after the arguments are read

USAGE = (
    "usage: python -m hfgen.run SCRIPT.py [ARGUMENT ...]\n"
    "       python -m hfgen.run -m MODULE [ARGUMENT ...]\n"
    "Run a Python program after hfgen.patch(): every transformers model in it generates with hfgen.\n"
)


def main(arguments: list[str]) -> None:
    """Run the program that ``arguments`` name, with the ``sys.argv``, path and ``__main__`` of Python.

    Raises ``SystemExit`` with 2 for wrong arguments, and whatever the program raises.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        raise SystemExit(0)
    is_module = arguments[:1] == ["-m"]
    program = arguments[1:] if is_module else arguments
    if not program or program[0].startswith("-"):
        wrong = f"hfgen.run: no option {program[0]}\n" if program else ""
        sys.stderr.write(wrong + USAGE)
        raise SystemExit(2)
    if not is_module and not os.path.exists(program[0]):
        sys.stderr.write(f"hfgen.run: there is no file {program[0]!r}\n")
        raise SystemExit(2)
    hfgen.patch()
    sys.argv = program
    sys.excepthook = _show
    if is_module:  # Python has put the working directory in front of the path
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    elif os.path.isdir(program[0]):
        runpy.run_path(program[0], run_name="__main__")
    else:
        _run_file(program[0])


def _run_file(name: str) -> None:
    """Run a script in a new module ``__main__``, which stays while threads and exit handlers run."""
    path = os.path.abspath(name)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback from where the program begins: without this module and ``runpy``."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_THE_PROGRAMS:
        trace = trace.tb_next
    if trace is None and isinstance(error, ImportError):  # runpy's: there is no such module
        sys.stderr.write(f"hfgen.run: {error}\n")
    else:
        sys.__excepthook__(kind, error.with_traceback(trace), trace)


_NOT_THE_PROGRAMS = (_show.__code__.co_filename, runpy.run_path.__code__.co_filename)

if __name__ == "__main__":
    main(sys.argv[1:])
