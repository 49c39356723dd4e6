"""Ways out of sandboxes through the daemon: what proxy and relay have in common.

Sockets are bound inside and accepted from within bounds (`gate`); names and addresses are those
that the policy opens (`reach`), connected to from the host (`upstream`).

doors = bind("127.77.0.1")                      # in a thread in the sandbox's namespace
gate = Gate(Limits())
gate.open(doors.tls, 443, serve)
await gate.close()
"""
