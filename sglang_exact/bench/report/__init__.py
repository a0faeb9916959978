# SPDX-License-Identifier: Apache-2.0
"""`bench report`: one page from any set of records."""
