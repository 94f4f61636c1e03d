"""``python -m dray.cli``."""

from dray.cli import main

main()
