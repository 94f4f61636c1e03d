"""torchrun, as a script: see `tests.forks.process.torchrun`."""

from __future__ import annotations

from torch.distributed.run import main

if __name__ == "__main__":
    main()
