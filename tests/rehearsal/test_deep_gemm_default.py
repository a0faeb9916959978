# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's determinism off: the host is told that it is on and leaves it alone."""

from __future__ import annotations

import ast
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from sglang_exact import hooks, settings
from sglang_exact.hooks.testing import deep_gemm_default
from sglang_exact.settings import Settings


class DeepGemm(ModuleType):
    """The switch of the library, and what was set during each product."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.on, self.seen = False, list[bool]()
        self.get_deterministic_algorithms = lambda: self.on

    def use_deterministic_algorithms(self, on: bool) -> None:
        self.on = on

    def host_product(self, fails: bool) -> str:
        """As the host calls it: on around the product, and as before after it."""
        before = self.get_deterministic_algorithms()
        if not before:
            self.use_deterministic_algorithms(True)
        try:
            self.seen.append(self.on)
            if fails:
                raise RuntimeError("no such shape")
            return "product"
        finally:
            if not before:
                self.use_deterministic_algorithms(False)


@pytest.mark.parametrize("fails", [False, True])
def test_the_host_leaves_it_off(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    library = DeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    if fails:
        with pytest.raises(RuntimeError, match="no such shape"):
            deep_gemm_default.matmul_persistent_deepgemm(library.host_product, fails)
    else:
        assert (
            deep_gemm_default.matmul_persistent_deepgemm(library.host_product, False)
            == "product"
        )
    # Without the control it is on, also after a product that failed.
    assert library.host_product(False) == "product"
    assert library.seen == [False, True]
    assert not library.on and not library.get_deterministic_algorithms()


def test_it_wraps_what_asks_the_library() -> None:
    """The host's function that turns determinism on, and the overlay's variable."""
    module, _, name = deep_gemm_default.TARGET.rpartition(".")
    path = Path("/".join(module.split("."))).with_suffix(".py")
    try:
        host = metadata.distribution("sglang").locate_file(path)
    except metadata.PackageNotFoundError:
        pytest.skip("no host")
    text = Path(str(host)).read_text(encoding="utf-8")
    found = {
        x.name
        for x in ast.parse(text).body
        if isinstance(x, ast.FunctionDef)
        and "get_deterministic_algorithms" in ast.unparse(x)
        and "use_deterministic_algorithms(True)" in ast.unparse(x)
    }
    assert found == {name}
    config, reasons = settings.read({deep_gemm_default.SWITCH: "1"})
    assert config.deep_gemm_default and reasons == []
    assert not settings.read({})[0].deep_gemm_default


def test_only_the_setting_registers_it() -> None:
    def names(config: Settings) -> set[str]:
        return {hook.name for hook in hooks.select(config, hooks.SCHEDULER)}

    on = names(Settings(enable=True, deep_gemm_default=True))
    assert on - names(Settings(enable=True)) == {"test_deep_gemm_default"}
