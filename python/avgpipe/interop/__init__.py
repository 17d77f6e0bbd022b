"""Bridges to other libraries. Each module imports its library and is itself imported only when it is needed."""
