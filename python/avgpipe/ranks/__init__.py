"""The processes of a run: how they start, meet, communicate, and notice each other's death."""
