"""Functions that kernels are made of: optimised by themselves, linked and made machine code once.

Numba optimises and turns into machine code every function as soon as it is compiled, together with
all that it calls: what lies five calls deep was optimised six times, and what was made of the parts
never ran. Here a part is LLVM code optimised alone; a kernel links each part once, and LLVM inlines
and optimises the whole. A first call of attention in bfloat16 took 14.5 s of CPU in numba's own
way, 12.7 s without machine code of the parts, and takes 9.8 s as here (Xeon, 2026-11-23). Results
of 15 calls are the same bits, and kernels as fast: forward passes take 0.93 to 1.00 of their time,
backward passes and decoding 0.97 to 1.02. Parts that LLVM optimised only within the whole ran up to
14 % slower. Of numba's passes over a part those over each function are needed, without them kernels
took up to 1.08 of their time, and of the two rounds over it all the first: leaving out the second
saves 0.9 s of a first `generate`, with the same bits in 0.96 to 1.02 of the time.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _NoMachineCode:
    """A stand-in for the code generator of a function without machine code, which accepts numba's
    environments and ignores them."""

    @staticmethod
    def set_env(name: str, env: Any) -> None:
        pass


class _LinkedLibrary(JITCodeLibrary):
    """The LLVM code of one function, optimised, without the functions that it calls and without
    machine code, for kernels to link. `LinkedCompiler` makes one for each function decorated by
    `threads.inner`."""

    codegen = _NoMachineCode()

    def finalize(self) -> None:
        """Optimise the code of this function; what it calls is linked when machine code is made."""
        if hasattr(self, "_reload_init"):  # numba 0.62 has none
            for library in self._linking_libraries:
                self._reload_init.update(library._reload_init)
        self._optimize_once()
        self._finalize_dynamic_globals()
        _let_be_repeated(self._final_module)
        self._finalized = True

    def _optimize_once(self) -> None:
        """Run the first of numba's two rounds of passes; the second is for the whole."""
        passes, builder = self._codegen._module_pass_manager(
            loop_vectorize=self._codegen._loopvect,
            slp_vectorize=False,
            opt=self._codegen._opt_level,
            cost="cheap",
        )
        passes.run(self._final_module, builder)

    def _get_module_for_linking(self) -> Any:
        """Return an LLVM module with this function and all that it calls, each once, which a kernel
        links; the module is made at the first call and kept."""
        self._ensure_finalized()
        if self._shared_module is None:
            whole = self._final_module.clone()
            for library in self._parts():
                is_part = isinstance(library, _LinkedLibrary)
                module = library._final_module if is_part else library._get_module_for_linking()
                whole.link_in(module, preserve=True)
            self._shared_module = whole
        return self._shared_module

    def _parts(self) -> list[Any]:
        """Return the libraries of all functions that this one calls, directly or not, callers
        first.

        LLVM links a function that may be repeated only if something linked before calls it.
        """
        found: dict[Any, None] = {}

        def visit(library: Any) -> None:
            if library not in found and isinstance(library, _LinkedLibrary):
                for callee in library._linking_libraries:
                    visit(callee)
            found.setdefault(library)

        for library in self._linking_libraries:
            visit(library)
        return list(reversed(found))

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # as of a function that has no wrapper for Python


def _let_be_repeated(module: Any) -> None:
    """Mark all functions that `module` defines as linkonce_odr, so that a kernel may link them from
    several of its parts and keeps the first."""
    for function in module.functions:
        if not function.is_declaration and function.linkage == llvm.Linkage.external:
            function.linkage = "linkonce_odr"


class LinkedCompiler(Compiler):
    """Numba's compiler, with a `_LinkedLibrary` for its result: the function can be linked into
    kernels, not called from Python."""

    def define_pipelines(self) -> Any:
        state = self.state
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().define_pipelines()
