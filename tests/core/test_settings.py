# SPDX-License-Identifier: Apache-2.0
"""SGLANG_EXACT_*: what is read, and what is refused."""

from __future__ import annotations

import pytest

from sglang_exact import settings


def test_nothing_set_is_off() -> None:
    config, reasons = settings.read({})
    assert reasons == []
    assert config == settings.Settings()
    assert not config.enable
    assert not config.any_test


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_switch_is_on(text: str) -> None:
    config, reasons = settings.read({"SGLANG_EXACT_ENABLE": text})
    assert config.enable
    assert reasons == []


@pytest.mark.parametrize("text", ["0", "false", "No", "", "off"])
def test_switch_is_off(text: str) -> None:
    config, reasons = settings.read({"SGLANG_EXACT_ENABLE": text})
    assert not config.enable
    assert reasons == []


def test_names_of_the_host_are_not_ours() -> None:
    """The host shares the prefix; its variable must not end a stock server."""
    for name in settings.HOST_VARIABLES:
        assert settings.read({name: "0"}) == (settings.Settings(), [])


def test_every_wrong_value_is_named() -> None:
    """A typo must not read as off: the server would start without the overlay."""
    config, reasons = settings.read(
        {
            "SGLANG_EXACT_ENABLE": "yess",
            "SGLANG_EXACT_ENABEL": "1",
            "SGLANG_EXACT_small": "1",
            settings.SMALL_M_VARIABLE: "17",
        }
    )
    found = [reason.found for reason in reasons]
    assert len(found) == 4
    assert not config.enable
    for name in ("ENABLE='yess'", "ENABEL", "EXACT_small", "TRITON='17'"):
        assert any(name in text for text in found), (name, found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", settings.SMALL_M_DEFAULT), ("0", 0), ("1", 1), ("16", 16)],
)
def test_small_m(text: str, expected: int) -> None:
    config, reasons = settings.read({settings.SMALL_M_VARIABLE: text})
    assert config.small_m == expected
    assert reasons == []


@pytest.mark.parametrize("text", ["-1", "17", "8.0", "x"])
def test_small_m_out_of_range(text: str) -> None:
    _, reasons = settings.read({settings.SMALL_M_VARIABLE: text})
    assert len(reasons) == 1


def test_test_settings_show() -> None:
    config, reasons = settings.read(
        {
            "SGLANG_EXACT_TEST_REHEARSAL": "1",
            "SGLANG_EXACT_TEST_ORACLE": "plan.json",
            "SGLANG_EXACT_TEST_DISABLE_HOOKS": "a, b,",
            "SGLANG_EXACT_TEST_DEEP_GEMM_DEFAULT": "1",
        }
    )
    assert reasons == []
    assert config.test_settings() == {
        "rehearsal": True,
        "oracle": True,
        "disabled_hooks": ["a", "b"],
        "deep_gemm_default": True,
    }
    assert config.any_test
    assert not config.enable


def test_variables_of_other_programs_are_none_of_ours() -> None:
    _, reasons = settings.read({"SGLANG_EXACTLY": "1", "SGLANG_PLUGINS": "x"})
    assert reasons == []


@pytest.mark.parametrize(
    ("text", "expected"), [("", None), ("0", 0.0), ("64", 64.0), ("1.5", 1.5)]
)
def test_host_memory_for_requests_that_wait(text: str, expected: float | None) -> None:
    config, reasons = settings.read({"SGLANG_EXACT_PREEMPT_GIB": text})
    assert config.preempt_gib == expected
    assert reasons == []


@pytest.mark.parametrize("text", ["-1", "all", "1e3", "inf", "1.2.3", "."])
def test_host_memory_that_is_no_number(text: str) -> None:
    config, reasons = settings.read({"SGLANG_EXACT_PREEMPT_GIB": text})
    assert config.preempt_gib is None
    assert [reason.found for reason in reasons] == [
        f"SGLANG_EXACT_PREEMPT_GIB={text!r}"
    ]
