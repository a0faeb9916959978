# SPDX-License-Identifier: Apache-2.0
"""Edit a module's source, or run a callback, while the module is being imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new`, exactly `count` times, without moving a line.

    Lines must stay where they are because Triton's interpreter reads kernels back
    from the file by line number.
    """

    old: str
    new: str
    count: int = 1


@dataclass(frozen=True)
class Mend:
    """What happens to one host module while it loads.

    Attributes:
        module: dotted name of the host module.
        why: what stops the host there without an accelerator.
        edits: source edits, applied in order before the module runs.
        after: called with the module once it ran; None if nothing is to be done.
        needs: attributes the module must have for `after` to make sense.
    """

    module: str
    why: str
    edits: tuple[Edit, ...] = ()
    after: Callable[[ModuleType], None] | None = None
    needs: tuple[str, ...] = ()


def edited(source: str, mend: Mend) -> str:
    """`source` with the edits of `mend`.

    Raises:
        RuntimeError: an anchor is not there as often as expected, or an edit would
            move lines.
    """
    for edit in mend.edits:
        found = source.count(edit.old)
        if found != edit.count:
            raise RuntimeError(
                f"{mend.module}: found {found} times, expected {edit.count} times: "
                f"{edit.old!r}. Reason of the edit: {mend.why}. Fix: install the "
                "pinned SGLang, or bring sglang_exact/rehearsal/host_mends.py up to "
                "the installed one."
            )
        if edit.old.count("\n") != edit.new.count("\n"):
            raise RuntimeError(
                f"{mend.module}: found an edit that moves lines, expected as many "
                f"newlines in {edit.new!r} as in {edit.old!r}. Fix: pad the edit."
            )
        source = source.replace(edit.old, edit.new)
    return source


class _MendingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from edited source and then runs the mend's callback."""

    def __init__(self, name: str, path: str, mend: Mend) -> None:
        super().__init__(name, path)
        self.mend = mend

    def get_code(self, fullname: str) -> CodeType | None:
        if not self.mend.edits:
            return super().get_code(fullname)
        # Compiled from memory: the host's byte-code cache must stay the host's.
        source = self.get_source(fullname)
        if source is None:
            raise RuntimeError(f"{fullname}: found no source, expected a .py file")
        return compile(edited(source, self.mend), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        missing = [name for name in self.mend.needs if not hasattr(module, name)]
        if missing:
            raise RuntimeError(
                f"{self.mend.module}: found no {', '.join(missing)}, expected the "
                f"names of the pinned host. Reason of the mend: {self.mend.why}. "
                "Fix: install the pinned SGLang, or bring "
                "sglang_exact/rehearsal/host_mends.py up to the installed one."
            )
        if self.mend.after is not None:
            self.mend.after(module)


class MendingFinder(importlib.abc.MetaPathFinder):
    """Serves the modules that have a mend; leaves every other import alone."""

    def __init__(self, mends: Sequence[Mend]) -> None:
        self.mends = {mend.module: mend for mend in mends}
        if len(self.mends) != len(mends):
            raise ValueError("found two mends of one module, expected one each")

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        mend = self.mends.get(fullname)
        if mend is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _MendingLoader(fullname, spec.origin, mend)
        return spec


def install(mends: Sequence[Mend]) -> None:
    """Put the mends in force for modules imported from now on.

    Raises:
        RuntimeError: one of the modules is imported already.
    """
    late = [mend.module for mend in mends if mend.module in sys.modules]
    if late:
        raise RuntimeError(
            f"found already imported: {', '.join(late)}; expected to come first. "
            "Fix: start the process with sglang_exact.rehearsal.environment."
        )
    sys.meta_path.insert(0, MendingFinder(mends))
