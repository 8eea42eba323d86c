"""The stored figures of other tools, read without those tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "peer_figures.json"


def read_peers() -> list[dict[str, Any]]:
    """Return the stored figures of all tools; none where nothing is stored yet."""
    if not PATH.exists():
        return []
    return json.loads(PATH.read_text(encoding="utf-8"))
