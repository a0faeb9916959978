# SPDX-License-Identifier: Apache-2.0
"""The installed host: its source, its pins, what it reads, headers below it."""

VERSION = "0.5.23"
"""The release of SGLang that is served: the one whose pins a device run has proven."""
