# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels ahead of time, without a GPU, and disassemble them.

Not for a process with TRITON_INTERPRET set: there kernels are Python functions.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any

import triton
import triton.backends.nvidia as nvidia_backend
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BIN = os.path.join(os.path.dirname(nvidia_backend.__file__), "bin")


def compile_kernel(
    kernel: Any,
    signature: dict[str, str | tuple[str, ...]],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
    num_stages: int,
    multiples_of_16: Iterable[str] = (),
    source_class: Any = ASTSource,
) -> Any:
    """Triton's compiled kernel for `capability`; pointers are 16-byte aligned.

    multiples_of_16: numbers, and tuples of which all numbers are.
    source_class: GluonASTSource for kernels in Gluon.
    """
    names = list(kernel.arg_names)
    apart = [p.name for p in kernel.params if p.do_not_specialize]
    if tuples := [n for n in apart if type(signature.get(n)) is tuple]:
        raise ValueError(
            f"found tuples not to be specialised: {tuples}, expected plain numbers; "
            "Triton specialises what stands inside a tuple"
        )
    full = {name: signature.get(name, "constexpr") for name in names}
    aligned = {n for n, kind in signature.items() if kind[0] == "*"}
    paths = []
    for name in aligned | set(multiples_of_16):
        at, kind = names.index(name), signature[name]
        paths += [(at, i) for i in range(len(kind))] if type(kind) is tuple else [(at,)]
    attrs = {path: [["tt.divisibility", 16]] for path in paths}
    source = source_class(
        fn=kernel,
        signature=full,
        constexprs={(names.index(k),): v for k, v in constants.items()},
        attrs=attrs,
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )


def compile_sass(*args: Any, **options: Any) -> str:
    """SASS of a kernel; arguments as `compile_kernel`."""
    compiled = compile_kernel(*args, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(
            [os.path.join(_BIN, "nvdisasm"), "-c", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
