"""torchrun's agent, as `python -m torch.distributed.run` is one. Its ranks run `worker.py`, which runs the script."""

import os

from torch.distributed.run import main

os.environ["TESTS_AGENT"] = str(os.getpid())
main()
