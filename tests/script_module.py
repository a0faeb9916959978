# SPDX-License-Identifier: Apache-2.0
"""Programs of scripts/, which have no suffix, as modules for tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    """A program of scripts/ as a module."""
    path = str(ROOT / "scripts" / name)
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader)
    if spec is None:
        raise ImportError(f"found no program {path}")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
