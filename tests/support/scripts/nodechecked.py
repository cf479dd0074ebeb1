"""A rank of a node check: `nodechecked.py ARGS` is `python -m migrator.nodecheck ARGS`."""

import sys

from migrator.nodecheck.__main__ import main

sys.exit(main(sys.argv[1:]))
