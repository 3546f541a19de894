"""``python -m penstock`` is ``penstock``."""

import sys

from penstock.cli.main import main

# The guard matters: worker processes of torch's DataLoader import this module again where they are spawned.
if __name__ == "__main__":
    sys.exit(main())
