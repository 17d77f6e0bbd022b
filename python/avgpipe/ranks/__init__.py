"""The processes of a run: how they start, meet, speak, and notice each other's death."""
