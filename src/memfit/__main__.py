"""Make ``python -m memfit`` the same as ``memfit``."""

from __future__ import annotations

import sys

from memfit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
