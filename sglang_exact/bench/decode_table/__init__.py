# SPDX-License-Identifier: Apache-2.0
"""`bench decode-table`: decode speed and time to first token, server by server."""
