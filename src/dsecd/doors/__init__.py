"""Sockets of the daemon inside sandboxes: bound there, accepted from within bounds (`gate`).

doors = bind("127.77.0.1")                      # in a thread in the sandbox's namespace
gate = Gate(Limits())
gate.open(doors.tls, 443, serve)
await gate.close()
"""
