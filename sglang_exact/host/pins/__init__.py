# SPDX-License-Identifier: Apache-2.0
"""Pins: what each supported host release looked like when it was proven."""
