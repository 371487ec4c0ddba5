"""Write ``.docs/parity.md``: ``python -m tests.parity``, where all peers are installed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.parity.peers import missing
from tests.parity.table import PEERS, page

TARGET = Path(__file__).resolve().parents[2] / ".docs" / "parity.md"


def main() -> int:
    if reasons := [reason for peer in PEERS if (reason := missing(peer))]:
        print(f"the table is written with every peer or not at all: {', '.join(reasons)}", file=sys.stderr)
        return 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(page(), encoding="utf-8")
    print(f"written: {TARGET}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
