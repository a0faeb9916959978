# SPDX-License-Identifier: Apache-2.0
"""Make the fake server and the helpers importable by the tests beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
