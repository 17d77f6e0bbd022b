"""The ``avgpipe`` command. ``main`` is its entry; every command has a file of its own."""
