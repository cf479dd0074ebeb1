"""The shim of a container, in a warm interpreter: what it would start as `python SCRIPT` it forks."""

import ctypes
import os

from migrator.testing import _shim
from tests.support.warm_pods import PR_SET_PDEATHSIG, become

# It ends when its input does, and takes the container along; killed with the fork server it would leave that behind.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)
os.execvpe = lambda file, argv, env: become(argv, env)
_shim.main()
