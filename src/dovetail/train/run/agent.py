"""torchrun without its epilogue: what `dovetail train` starts.

The script's own traceback stands on stderr when a rank fails, and the caller knows which signal it sent. torchrun would
add a traceback of its own to either.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as e:
        sys.exit(128 + int(e.sigval))
    except ChildFailedError:
        sys.exit(1)
