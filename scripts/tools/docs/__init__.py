# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/ that follow from the source."""
