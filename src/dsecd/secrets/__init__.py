"""Secrets that a sandbox uses and never holds: a proxy on the host adds them to its requests.

    sandbox → (its resolver says 127.77.0.1) → proxy → real name, over verified TLS
              HTTP/1.1, with or without TLS     + Authorization: …

For each name with a secret the sandbox's resolver answers a loopback address of the sandbox's own
network namespace, where sockets of the daemon listen (`doors`). TLS ends there, with a certificate
of the daemon's own authority, which the sandbox is made to trust (`trust`). A request is parsed,
checked (`heads`), written anew with the secret in it, and sent to the real name; the answer comes
back with the secret masked where it is echoed as it is (`mask`).

    authority = Authority.load(state / "secrets")
    proxy = SandboxProxy(secrets, [bind("127.77.0.1")], authority.context, dialer.open, …)
    proxy.start()
    await proxy.close()

Nothing is imported here: only who issues certificates needs `authority`, and 9 MB of libraries.

What it does not do: a service that hands the secret out in some other form (hashed, in parts, in a
compressed body) hands it to the sandbox. Whoever holds a secret for a name can do all that the
secret allows there.
"""
