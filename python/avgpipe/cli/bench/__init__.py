"""``avgpipe bench``: our way, what one writes instead, and the machine's own limit, in one run."""
