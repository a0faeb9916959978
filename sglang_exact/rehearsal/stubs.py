# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that the host imports and does not use in a rehearsal.

torchvision and vllm would each pull a CUDA build of torch into the environment. The
host imports them at module level (image processors, fall-back kernels), so something
has to answer; nothing of it is called for a text model.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

STOOD_IN_FOR = ("torchvision", "vllm")


class Placeholder:
    """Accepts being subclassed, called, subscripted and read from at import time."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Placeholder:
        return Placeholder()

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()

    def __getitem__(self, key: object) -> Placeholder:
        return Placeholder()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __iter__(self) -> Iterator[Placeholder]:
        return iter(())

    def __or__(self, other: object) -> Placeholder:
        return Placeholder()

    __ror__ = __or__


class StandIn(ModuleType):
    """An empty package whose every public attribute is a `Placeholder`."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Placeholder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves `import torchvision`, yet answers "not installed" to those who ask.

    transformers asks `importlib.util.find_spec` whether torchvision is there and
    would go on to use it; the host just imports it. Only the second is served.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.names or _asked_not_imported():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _asked_not_imported() -> bool:
    """Whether the search was started by `importlib.util.find_spec`."""
    frame: FrameType | None = sys._getframe(2)
    # Python's own import machinery is frozen; the first frame that is not belongs to
    # the module that imports.
    while frame is not None and frame.f_code.co_filename.startswith("<frozen "):
        if frame.f_code is importlib.util.find_spec.__code__:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code is importlib.util.find_spec.__code__


def hide_from_transformers(module: ModuleType) -> None:
    """Make transformers' availability check say no, also after a stand-in loaded.

    Once a stand-in is in `sys.modules`, `importlib.util.find_spec` finds it there
    without asking any finder.
    """
    asked = module._is_package_available

    def is_package_available(
        pkg_name: str, return_version: bool = False
    ) -> tuple[bool, str | None]:
        if pkg_name in STOOD_IN_FOR:
            return False, "N/A" if return_version else None
        answer: tuple[bool, str | None] = asked(pkg_name, return_version)
        return answer

    module.__dict__["_is_package_available"] = is_package_available


def install() -> None:
    """Stand in for every package of `STOOD_IN_FOR` from now on.

    Raises:
        RuntimeError: one of them is installed; its CUDA dependencies would have
            replaced the CPU build of torch.
    """
    there = [
        name
        for name in STOOD_IN_FOR
        if importlib.machinery.PathFinder.find_spec(name) is not None
    ]
    if there:
        raise RuntimeError(
            f"found installed: {', '.join(there)}; expected an environment without "
            "them. Fix: make a fresh environment with scripts/rehearsal_env."
        )
    sys.meta_path.insert(0, StandInFinder(STOOD_IN_FOR))
