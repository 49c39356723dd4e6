"""The kernel of microVM guests: where it is installed, and with which command line it is booted.

`scripts/build-guest` makes it from packaging/guest.config.
"""

from __future__ import annotations

KERNEL = "guest/kernel"  # below the state directory
