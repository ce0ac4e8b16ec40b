"""Modules beside the tests, which the tests and processes that they start import."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
