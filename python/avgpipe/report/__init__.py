"""The course of a run: its training loop, rows and summary, the files of its folder, curves and loggers."""
