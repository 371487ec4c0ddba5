"""`python -m softs_lightning` is `softs-distill`."""

import sys

from softs_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
