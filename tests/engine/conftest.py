"""Lets the tests here import `fake_runner` (there are no packages under tests/)."""

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))
