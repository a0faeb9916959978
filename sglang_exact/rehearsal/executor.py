# SPDX-License-Identifier: Apache-2.0
"""The interpreter's grid loop without what it does anew for every launch.

Same programs in the same order on the same memory, hence the same bits. Left out:
patching `triton.language` (done once, see `interpreter`), inspecting the kernel's
signature, and copying every argument's storage onto itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _on_cpu(arg: Any) -> bool:
    device = getattr(arg, "device", None)
    return device is None or getattr(device, "type", "cpu") == "cpu"


def _remember_look_ups(interp: ModuleType, core: ModuleType) -> None:
    """Answer two questions from memory that every operation asks anew."""
    plain_dtype: Callable[[Any], Any] = interp._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        # Scalar types are told apart by name; pointers and blocks are composed.
        if type(tt_dtype) is not core.dtype:
            return plain_dtype(tt_dtype)
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = plain_dtype(tt_dtype)
        return found

    numel_of = functools.lru_cache(maxsize=None)(core.validate_block_shape)
    interp.__dict__["_get_np_dtype"] = get_np_dtype
    core.__dict__["validate_block_shape"] = lambda shape: numel_of(tuple(shape))


def install(interp: ModuleType, core: ModuleType) -> None:
    """Replace the launch and call methods of `triton.runtime.interpreter`.

    Args:
        interp: `triton.runtime.interpreter`.
        core: `triton.language.core`.
    """
    _remember_look_ups(interp, core)
    signatures: dict[Any, frozenset[str]] = {}
    builder, convert = interp.interpreter_builder, interp._implicit_cvt

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        fn = self.fn
        names = signatures.get(fn)
        if names is None:
            names = frozenset(inspect.getfullargspec(fn).args)
            signatures[fn] = names
        kwargs = {k: v for k, v in kwargs.items() if k in names}
        for arg in (*args, *kwargs.values()):
            if not _on_cpu(arg):
                raise RuntimeError(
                    f"{fn.__name__}: found an argument on {arg.device}, expected CPU "
                    "tensors. Fix: serve a rehearsal with --device cpu."
                )
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        bound = inspect.getcallargs(fn, *args, **kwargs)
        constexprs = self.constexprs
        bound = {
            name: arg if name in constexprs else convert(arg)
            for name, arg in bound.items()
        }
        grid = self.grid(bound) if callable(self.grid) else self.grid
        grid = tuple(grid) + (1,) * (3 - len(grid))
        # A kernel may launch nothing, but never from inside another kernel.
        builder.set_grid_dim(*grid)
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    builder.set_grid_idx(x, y, z)
                    fn(**bound)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interp.GridExecutor.__call__ = launch
    interp.InterpretedFunction.__call__ = call
