# The session of the DSec paper (Listing 1). Run it with: python -m libdsec examples/listing1.py
# ruff: noqa: F704 - `python -m libdsec` runs scripts that use await at the top level
from libdsec import DSecClient, DSecContainerRunArgs

client = DSecClient()
await client.open()
args = DSecContainerRunArgs(
    container_image="base/debian:12",
    memory_limit_mb=4096, cpu_cores_limit=4,
    ttl_running_stop=300,                       # idle timeout, s
    network_rules={"npm": False, "pypi": True},
    init_user="root",
)
sandbox = await client.run_container(args, timeout=120)
result = await sandbox.run_shell("echo hello world")
await sandbox.stop()
print(result.stdout, end="")
