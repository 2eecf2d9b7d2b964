"""How hard hypothesis tries: "ci" when CI is set, else "quick"; ``--hypothesis-profile`` overrides both."""

import os
import signal

from hypothesis import settings

# No deadline: the machine is shared, and a slow example is not a wrong one.
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.register_profile("quick", max_examples=25, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "quick")

# A shell that starts the suite in the background ignores interrupts, and so would what a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
