"""Functions that new processes import: they find them by the path that they take over from this one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
