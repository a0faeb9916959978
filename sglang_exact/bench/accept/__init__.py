# SPDX-License-Identifier: Apache-2.0
"""`bench accept`: speed-up and acceptance length on the usual data sets."""
