"""Policies that come with DSec, to use as they are or to extend. Pure.

| preset | network | the rest |
|---|---|---|
| `sealed` | nothing but loopback | as the platform has it |
| `grader` | nothing but loopback | system directories read-only, no mounts |
| `swe` | registries of packages and code hosting | as the platform has it |
| `open` | all but networks that are not the public internet | as the platform has it |
"""

from __future__ import annotations

from dsecd.policy.language import FileRule, Files, Mounts, Network, NetworkRule, Policy

SWE_SERVICES = (
    "alpine", "conda", "cpan", "cran", "crates", "debian", "fedora", "github", "gitlab", "go",
    "hackage", "maven", "node", "npm", "nuget", "packagist", "pypi", "rubygems", "ubuntu",
)  # fmt: skip

# Not the public internet, from the registries of special-purpose addresses (RFC 6890): networks
# behind the host, metadata services of clouds, multicast, and what no peer can have.
NOT_PUBLIC = (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4", "64:ff9b:1::/48", "fc00::/7",
    "fe80::/10", "fec0::/10", "ff00::/8",
)  # fmt: skip

# A grader that an agent's leftovers could change would grade itself
SYSTEM_DIRECTORIES = ("/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr")

PRESETS: dict[str, Policy] = {
    "sealed": Policy(name="sealed"),
    "grader": Policy(
        name="grader",
        files=Files(rules=[FileRule(paths=list(SYSTEM_DIRECTORIES), deny=["write"])]),
        mounts=Mounts(default="deny"),
    ),
    "swe": Policy(name="swe", network=Network(services=dict.fromkeys(SWE_SERVICES, True))),
    "open": Policy(
        name="open",
        network=Network(
            default="allow", rules=[NetworkRule(deny=network) for network in NOT_PUBLIC]
        ),
    ),
}
