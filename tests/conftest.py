"""What all tests share: helpers beside the tests are importable from every folder below."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
