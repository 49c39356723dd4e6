"""The filter on the host's end of a sandbox's interface: clsact, ingress, one BPF program.

It belongs to the interface and goes with it, so it needs no pin and outlives the daemon. Sources:
tc-bpf(8), linux/pkt_sched.h, linux/pkt_cls.h, linux/rtnetlink.h.
"""

from __future__ import annotations

import struct

from dsecd.host.rtnetlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Message,
    attr_text,
    attr_u32,
    nest,
)

RTM_NEWQDISC, RTM_NEWTFILTER = 36, 44
TCA_KIND, TCA_OPTIONS = 1, 2
TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT = 6, 7, 8, 1
_CLSACT, _HANDLE, _INGRESS = 0xFFFFFFF1, 0xFFFF0000, 0xFFFFFFF2
_PRIORITY, _ETH_P_ALL = 1, 0x0300  # the protocol in network order
_TCMSG = struct.Struct("=BxHiIII")


def qdisc(index: int) -> Message:
    """Give interface `index` its clsact queueing discipline; EEXIST: it has one."""
    body = _TCMSG.pack(0, 0, index, _HANDLE, _CLSACT, 0) + attr_text(TCA_KIND, "clsact")
    return Message(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, body, "add clsact")


def program(index: int, fd: int) -> Message:
    """Run the program `fd` on what the interface receives; replaces the one before at once."""
    head = _TCMSG.pack(0, 0, index, 1, _INGRESS, _PRIORITY << 16 | _ETH_P_ALL)
    options = nest(
        TCA_OPTIONS,
        attr_u32(TCA_BPF_FD, fd),
        attr_text(TCA_BPF_NAME, "dsec_link"),
        attr_u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT),
    )
    body = head + attr_text(TCA_KIND, "bpf") + options
    return Message(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_REPLACE, body, "add the network program")
