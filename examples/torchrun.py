"""torchrun itself, minus the traceback that it adds when it is stopped or when a rank has failed.

The ranks have said by then what there is to say. Arguments and exit codes are torchrun's:

    python examples/torchrun.py --standalone --nproc-per-node 2 examples/train_gpt.py
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run


def main() -> int:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(get_args_parser().parse_args())
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
