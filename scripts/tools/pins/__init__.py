# SPDX-License-Identifier: Apache-2.0
"""Pins: what the overlay rests on in a host release, and what another one changed."""
