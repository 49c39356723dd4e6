"""Names for sandboxes: a DNS server in the daemon that answers what the policy allows.

Each sandbox has a `SandboxResolver` (its policy, budgets and open addresses) and a `Listener` (its
sockets); all share one `Lookups` (cache) and one `Forwarder` (the host's DNS servers).

    service = Resolver(upstreams(("192.0.2.53",)))
    served = service.open(policy, sink, [bind("10.213.0.1")], on_refusal=events.put)
    served.resolver.replace(new_policy)
    await served.close()

Vocabulary: a *ruling* is what a policy says of a name; an *opening* a protocol and ports that the
name opens at its addresses; addresses are *pinned* while they are open; a *sink* opens and closes
them in the kernel.

What it does not do: a name's rule opens addresses, and an address may serve other names as well (a
CDN). To hold connections to the names that are allowed is what `dsecd.relay` is for.
"""

from __future__ import annotations

from dsecd.resolver.budget import Limits
from dsecd.resolver.listener import Listener, Sockets, bind
from dsecd.resolver.lookup import Caching, Lookups
from dsecd.resolver.names import NameTable, Opening, Ruling
from dsecd.resolver.pins import Pin, Pins, Sink
from dsecd.resolver.sandbox import Refusal, SandboxResolver
from dsecd.resolver.service import Resolver, Served
from dsecd.resolver.upstream import Forwarder, Timing, Upstream, upstreams

__all__ = [
    "Caching", "Forwarder", "Limits", "Listener", "Lookups", "NameTable", "Opening", "Pin", "Pins",
    "Refusal", "Resolver", "Ruling", "SandboxResolver", "Served", "Sink", "Sockets", "Timing",
    "Upstream", "bind", "upstreams",
]  # fmt: skip
