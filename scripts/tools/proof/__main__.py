# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.proof`: the demonstration, as scripts/demo starts it."""

import sys

from tools import run
from tools.proof import options

run("proof.demo", options.demo(sys.argv[1:]))
