"""``python -m avgpipe`` and ``torchrun ... -m avgpipe``: the command."""

from avgpipe.cli.main import main

main()
