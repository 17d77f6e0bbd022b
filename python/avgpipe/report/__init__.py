"""The course of a run, what it reports to loggers, and its folder and pictures, read afterwards."""
