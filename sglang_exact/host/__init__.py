# SPDX-License-Identifier: Apache-2.0
"""The installed host: its source, its pins, what it reads, headers below it."""
