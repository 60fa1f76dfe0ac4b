"""torchrun without its own traceback at the end; `dovetail train` starts it.

When a rank fails, the script's own traceback is on stderr already; after a signal, the caller knows which one it sent.
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
