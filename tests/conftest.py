"""What holds for all tests."""

from __future__ import annotations

import signal

# A background job of a shell ignores SIGINT, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
