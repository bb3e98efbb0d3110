"""Functions that kernels are made of, compiled without machine code of their own.

Numba turns every function into machine code as soon as it is compiled, also one that only other
functions call. A kernel takes the LLVM code of all that it calls, and machine code is made of the
whole: what was made of its parts was never run, and took a fifth of the time of a first call
(attention in bfloat16: 14.5 s of CPU with it, 11.4 s without; Xeon, 2026-11-23). LLVM optimises the
parts still: kernels whose parts are optimised only as a whole are made in 9.3 s, and run up to 14 %
slower.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _NoMachineCode:
    """What stands for the code generator where an environment is set: there is none to set."""

    @staticmethod
    def set_env(name: str, env: Any) -> None:
        pass


class _LinkedLibrary(JITCodeLibrary):
    """A function's LLVM code, optimised, for kernels to link."""

    codegen = _NoMachineCode()

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # as of a function that has no wrapper for Python


class LinkedCompiler(Compiler):
    """Numba's compiler with `_LinkedLibrary` for its result."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()
