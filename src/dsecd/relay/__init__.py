"""Names that are checked: the way from a sandbox to an allowed name, for connections that name it.

    sandbox → (its resolver says 127.78.0.1) → relay → the name, as it stands in
              TLS on 443, HTTP on 80                   the ClientHello's SNI, or the request's Host

An address of a content network serves many names. With `check_names` in a policy no address of a
name is opened in the kernel; the resolver answers all of them with one address on the sandbox's own
loopback, where sockets of the daemon listen. What a connection names is judged by the table that
the resolver judges by, looked up by the daemon, and connected to from the host. TLS is not ended:
what was read of it is sent on, and the rest passes unseen (`tls`). HTTP goes through the exchange
of the proxy for secrets, without a secret: a request each, written anew.

What it does not do: a server that answers for other names within TLS (domain fronting) is not held
to the name. A connection without a name, or one that hides it (ECH), is refused.
"""
