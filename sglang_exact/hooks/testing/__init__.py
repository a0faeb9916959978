# SPDX-License-Identifier: Apache-2.0
"""Hooks for tests alone, each registered under a test setting of its own."""
