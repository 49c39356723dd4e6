"""The command line that the kernel of microVM guests is booted with.

`scripts/build-guest` makes the kernel, of packaging/guest.config; what can be said there is not
said here.
"""

from __future__ import annotations

COMMAND_LINE = " ".join(
    (
        "console=ttyS0",  # nothing is lost where there is none
        "quiet",  # each character of it leaves the guest
        "no_timer_check",  # on a busy host the check takes a late timer for a dead one, and panics
        "tsc=reliable",  # likewise the watchdog of clocks
        # One CPU: nine thousand instructions would lose their lock prefix, one at a time, which
        # takes a quarter of the boot under TCG and gains nothing there.
        "noreplace-smp",
        "rcupdate.rcu_expedited=1",  # for few CPUs waiting is what costs
        "swiotlb=noforce",  # 64 MB of bounce buffers, which virtio does not use
        "rdinit=/init",
        "--",
        "--vm",  # for init
    )
)
