# SPDX-License-Identifier: Apache-2.0
"""`bench sweep`: speed over context length, through aiperf."""
