# SPDX-License-Identifier: Apache-2.0
"""`bench quality`: the same problems on several servers, graded."""
