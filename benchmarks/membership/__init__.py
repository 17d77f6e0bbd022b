"""The membership of isolated pipelines, without processes: a world in which their rules run, and its size."""
