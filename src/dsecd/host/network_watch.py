"""Noticing that somebody else removed our firewall table.

`systemctl restart nftables` and `nft flush ruleset` take all tables with them. Sandboxes would then
reach each other and the host, so the table is put back as soon as the kernel tells (nfnetlink
multicast group NFNLGRP_NFTABLES).
"""

from __future__ import annotations

import socket

from dsecd.host.network_nft import NETLINK_NETFILTER, is_table_removal

_NFNLGRP_NFTABLES = 7


class TableWatch:
    """A socket of the calling thread's network namespace, to be read by the event loop."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, NETLINK_NETFILTER)
        try:
            self._socket.bind((0, 1 << (_NFNLGRP_NFTABLES - 1)))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def saw_removal(self) -> bool:
        """Read what came; return whether a table was removed, or may have been."""
        removed = False
        for _ in range(16):  # then let the event loop do something else
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:  # ENOBUFS: events were lost
                removed = True
                continue
            removed = removed or is_table_removal(data)
        return removed
