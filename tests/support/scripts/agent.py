"""torchrun's agent, as `python -m torch.distributed.run` is one. Its ranks run `worker.py`, which runs the script."""

import os
import sys

from tests.support.warm_pods import agent

os.environ["TESTS_AGENT"] = str(os.getpid())
sys.exit(agent())
