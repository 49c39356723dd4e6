"""A software-engineering task in a sandbox: a repository with a failing test, fixed and re-tested.

usage: quickstart.py IMAGE
"""

import asyncio
import sys
import time

from libdsec import DSecClient, DSecContainerRunArgs

CALC = """\
def mean(values):
    return sum(values) / len(values) + 1
"""
TEST = """\
import unittest

from calc import mean


class MeanTest(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3]), 2)


if __name__ == "__main__":
    unittest.main()
"""
COMMIT = (
    "git init -q . && git add -A && "
    "git -c user.name=agent -c user.email=agent@example.com commit -qm 'first version'"
)


class Steps:
    """Prints each step with the time since the one before."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        print(f"  {(now - self._last) * 1000:7.1f} ms  {text}")
        self._last = now


async def main(image: str) -> None:
    step = Steps()
    async with DSecClient() as client:
        args = DSecContainerRunArgs(
            container_image=image, memory_limit_mb=512, cpu_cores_limit=1, ttl_running_stop=300
        )
        sandbox = await client.run_container(args, timeout=60)
        step(f"sandbox {sandbox.id} created")
        try:
            await sandbox.files.write("/repo/calc.py", CALC)
            await sandbox.files.write("/repo/test_calc.py", TEST)
            step("repository written through the files API")
            await sandbox.run_shell(COMMIT, cwd="/repo", check=True)
            step("git init and commit")
            before = await sandbox.run_shell("python3 -m unittest -q", cwd="/repo")
            if before.exit_code != 1:
                raise SystemExit(f"the test should fail first: {before}")
            step(f"test fails as it should: exit code {before.exit_code}")
            source = await sandbox.files.read("/repo/calc.py")
            await sandbox.files.write("/repo/calc.py", source.replace(" + 1", ""))
            step("fix applied")
            after = await sandbox.run_shell("python3 -m unittest -q", cwd="/repo", check=True)
            step(f"test passes: {after.stderr.strip().splitlines()[-1]}")
            diff = await sandbox.run_shell("git diff --stat", cwd="/repo", check=True)
            step(f"diff: {diff.stdout.strip().splitlines()[-1].strip()}")
        finally:
            await sandbox.stop()
        step("sandbox stopped; nothing is left of it")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    asyncio.run(main(sys.argv[1]))
