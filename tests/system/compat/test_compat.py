"""Unmodified software from Debian works inside, for root and for an ordinary user."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import zipfile

import pytest

from libdsec import Sandbox
from tests.system.compat.debian import debian, download, mirror_answers

pytestmark = [
    pytest.mark.root,
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # the first one builds the layer
]


async def run(sandbox: Sandbox, script: str, user: str = "root", timeout: float = 120) -> str:
    """Run a script that stops at its first error; return its output, fail with all of it."""
    result = await sandbox.run_shell("set -e\n" + script, user=user, timeout=timeout)
    assert result.ok, f"{script}\n--- {result}\n{result.stdout}\n{result.stderr}"
    return result.stdout


async def test_gcc_and_make_build_a_program() -> None:
    async with debian() as sandbox:
        await sandbox.files.write("/src/m.c", "#include <stdio.h>\nint main(){puts(MSG);}\n")
        await sandbox.files.write(
            "/src/Makefile", "m: m.c\n\tgcc -Wall -DMSG='\"built\"' -o $@ $<\n\ncheck: m\n\t./m\n"
        )
        assert await run(sandbox, "make -s -C /src -j$(nproc) check") == "built\n"


async def test_git_commits_clones_and_rebases() -> None:
    async with debian() as sandbox:
        await run(sandbox, "useradd -m agent")
        for user in ("root", "agent"):
            home = "/root" if user == "root" else "/home/agent"
            script = f"""
            export HOME={home}; cd; git config --global user.email a@b
            git config --global user.name n; git config --global init.defaultBranch main
            git init -q one; cd one; echo 1 > f; git add f; git commit -qm first
            git checkout -qb side; echo 2 > g; git add g; git commit -qm second
            git checkout -q main; echo 3 >> f; git commit -qam third; git rebase -q main side
            cd ..; git clone -q one two; cd two; git checkout -q side
            git log --format=%s; git fsck --strict --no-dangling; git gc -q; git status --porcelain
            """
            output = await run(sandbox, script, user=user)
            assert output == "second\nthird\nfirst\n", output


async def test_users_su_and_sudo() -> None:
    async with debian() as sandbox:
        script = """
        groupadd -g 4000 team; useradd -m -u 1234 -G team alice; echo 'alice:pw' | chpasswd
        echo 'alice ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/alice
        su - alice -c 'id -un; id -Gn; touch ~/f; stat -c %u:%g ~/f'
        su - alice -c 'cat /etc/shadow 2>&1 | tail -c 18'
        su - alice -c 'sudo id -u; sudo -u postgres id -un; sudo cat /etc/shadow | grep -c alice'
        passwd -S alice | cut -d' ' -f2; usermod -aG sudo alice; userdel -r alice; ls /home
        """
        expected = "alice\nalice team\n1234:1234\nPermission denied\n0\npostgres\n1\nP\n"
        assert await run(sandbox, script) == expected
        await run(sandbox, "useradd -m -G sudo bob; echo 'bob:pw' | chpasswd")
        assert await run(sandbox, "echo pw | sudo -S -p '' id -u", user="bob") == "0\n"


async def test_chown_reaches_layer_files_and_every_id() -> None:
    async with debian() as sandbox:
        script = """
        chown -R 1000:1000 /usr/share/perl5; stat -c %u /usr/share/perl5/Debconf
        touch /f; chown 65534:65534 /f; stat -c %u:%g /f
        mv /usr/share/doc /usr/share/moved; ls -d /usr/share/moved; rm -rf /usr/share/moved
        setfacl --version >/dev/null 2>&1 || true; ln /bin/true /bin/hard; /bin/hard
        """
        assert await run(sandbox, script) == "1000\n65534:65534\n/usr/share/moved\n"


REPOSITORY = """
build() { # NAME DEPENDS POSTINST
  mkdir -p /b/$1/DEBIAN /b/$1/usr/share/$1; echo data > /b/$1/usr/share/$1/f
  printf 'Package: %s\\nVersion: 1.0\\nArchitecture: all\\nDepends: %s\\n' $1 "$2" \\
    > /b/$1/DEBIAN/control
  printf 'Maintainer: a <a@b>\\nDescription: d\\n' >> /b/$1/DEBIAN/control
  printf '#!/bin/sh\\nset -e\\n%s\\n' "$3" > /b/$1/DEBIAN/postinst; chmod 755 /b/$1/DEBIAN/postinst
  dpkg-deb --root-owner-group -b /b/$1 /srv/repo/$1.deb >/dev/null
}
mkdir -p /srv/repo
build dsec-low passwd "useradd -r lowuser; chown -R lowuser /usr/share/dsec-low"
build dsec-high "dsec-low (>= 1.0), libc6" "ldconfig; su -s /bin/sh lowuser -c true"
cd /srv/repo; dpkg-scanpackages . > Packages 2>/dev/null
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
echo 'deb [trusted=yes] file:///srv/repo ./' > /etc/apt/sources.list.d/local.list
"""


async def test_apt_get_installs_with_dependencies_and_removes() -> None:
    async with debian() as sandbox:
        await run(sandbox, REPOSITORY)
        script = """
        export DEBIAN_FRONTEND=noninteractive
        apt-get -q update; apt-get -qy install dsec-high; dpkg -s dsec-low | grep ^Status
        stat -c %U /usr/share/dsec-low/f; apt-get -qy purge dsec-low
        ls /usr/share/dsec-low 2>&1 || true; dpkg --audit; apt-get check -q
        """
        output = await run(sandbox, script)
        assert "Status: install ok installed" in output
        assert "\nlowuser\n" in output
        assert "No such file" in output


async def test_dpkg_installs_real_packages() -> None:
    packages = [await asyncio.to_thread(download, name) for name in ("hello", "tree")]
    if not all(packages):
        pytest.skip("the host's apt cannot download packages")
    async with debian() as sandbox:
        for package in packages:
            assert package is not None
            await sandbox.files.write(f"/tmp/{package.name}", package.read_bytes())
        script = """
        dpkg -i /tmp/*.deb >/dev/null; hello; tree --version | head -c 4; dpkg -V hello tree
        dpkg -r hello tree >/dev/null; [ ! -e /usr/bin/hello ]
        """
        output = await run(sandbox, script)
        assert output.startswith("Hello, world!\ntree")


async def test_apt_get_installs_from_the_mirror_through_nat() -> None:
    if not await asyncio.to_thread(mirror_answers):
        pytest.skip("the host itself cannot reach its mirror")
    async with debian(network="nat") as sandbox:
        options = (
            "-o Acquire::Check-Valid-Until=false -o Acquire::Check-Date=false -o Acquire::Retries=1"
        )
        update = await sandbox.run_shell(
            f"apt-get {options} -o Acquire::http::Timeout=15 update 2>&1", timeout=180
        )
        assert update.ok, update.stdout
        assert "Failed to fetch" not in update.stdout
        assert "Hello" in await run(
            sandbox, f"apt-get {options} -qy install hello >/dev/null; hello"
        )


def wheel(name: str) -> bytes:
    """Return a wheel with one module and one script."""
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}.py": b"def main():\n    print('from the wheel')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}-run = {name}:main\n".encode(),
    }
    record = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode() + b"\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return buffer.getvalue()


async def test_pip_installs_a_wheel_for_root_and_in_a_venv() -> None:
    async with debian() as sandbox:
        path = "/tmp/dsecwheel-1.0-py3-none-any.whl"
        await sandbox.files.write(path, wheel("dsecwheel"))
        await run(sandbox, "useradd -m agent")
        script = f"pip install -q --no-index --break-system-packages {path} 2>&1; dsecwheel-run"
        assert "from the wheel\n" in await run(sandbox, script)
        script = f"""
        cd /home/agent; python3 -m venv v; v/bin/pip install -q --no-index {path}
        v/bin/dsecwheel-run; v/bin/pip uninstall -qy dsecwheel
        """
        assert "from the wheel\n" in await run(sandbox, script, user="agent")


async def test_npm_installs_a_local_package() -> None:
    async with debian() as sandbox:
        script = """
        mkdir -p /p/dep /p/app; cd /p/dep
        echo '{"name":"dep","version":"1.0.0","bin":{"depbin":"cli.js"}}' > package.json
        printf '#!/usr/bin/env node\\nconsole.log("from npm")\\n' > cli.js
        npm pack --silent; cd ../app; echo '{"name":"app","version":"1.0.0"}' > package.json
        npm install --silent --offline --no-audit --no-fund ../dep/dep-1.0.0.tgz
        npx --offline depbin
        """
        assert (await run(sandbox, script)).endswith("from npm\n")


async def test_postgresql_serves_queries() -> None:
    async with debian() as sandbox:
        script = """
        export PATH=$PATH:$(echo /usr/lib/postgresql/*/bin) PGDATA=/tmp/pg; cd /tmp
        initdb -A trust >/dev/null; pg_ctl -s -w -l /tmp/log -o "-k /tmp" start
        psql -qh /tmp postgres -c 'create table t(i int)'
        psql -qh /tmp postgres -c 'insert into t select generate_series(1,50000)'
        psql -Ath /tmp postgres -c 'select sum(i) from t'
        psql -Ath 127.0.0.1 postgres -c 'select 1+1'
        pg_ctl -s -m fast stop; pg_ctl -s -w -l /tmp/log -o "-k /tmp" start
        psql -Ath /tmp postgres -c 'select count(*) from t'; pg_ctl -s -m fast stop
        """
        assert await run(sandbox, script, user="postgres") == "1250025000\n2\n50000\n"


async def test_tmux_keeps_a_shell() -> None:
    async with debian() as sandbox:
        await run(sandbox, "tmux new-session -d -s t -x 80 -y 24")
        await run(sandbox, "tmux send-keys -t t 'echo $((6*7))-done; tty' Enter")
        for _ in range(50):
            pane = await run(sandbox, "tmux capture-pane -p -t t")
            if "/dev/pts/" in pane:
                break
            await asyncio.sleep(0.1)
        assert "42-done" in pane
        assert "/dev/pts/" in pane
        await run(sandbox, "tmux kill-server")


MULTIPROCESSING = """
import multiprocessing as mp
from multiprocessing import shared_memory

def square(n): return n * n
def add(lock, total, queue):
    for _ in range(1000):
        with lock: total.value += 1
    queue.put('done')

if __name__ == '__main__':
    for method in ('fork', 'spawn', 'forkserver'):
        context = mp.get_context(method)
        with context.Pool(3) as pool: print(sum(pool.map(square, range(100))))
    lock, total, queue = mp.Lock(), mp.Value('i', 0, lock=False), mp.Queue()
    workers = [mp.Process(target=add, args=(lock, total, queue)) for _ in range(4)]
    for worker in workers: worker.start()
    print([queue.get() for _ in workers], end=' ')
    for worker in workers: worker.join()
    print(total.value)
    block = shared_memory.SharedMemory(create=True, size=8 << 20)
    block.buf[-1] = 7; print(block.buf[-1]); block.close(); block.unlink()
"""


async def test_python_multiprocessing() -> None:
    async with debian() as sandbox:
        await sandbox.files.write("/tmp/m.py", MULTIPROCESSING)
        await run(sandbox, "useradd -m agent")
        expected = "328350\n" * 3 + "['done', 'done', 'done', 'done'] 4000\n7\n"
        for user in ("root", "agent"):
            assert await run(sandbox, "python3 /tmp/m.py", user=user) == expected


async def test_a_headless_browser_starts() -> None:
    async with debian() as sandbox:
        await run(sandbox, "useradd -m agent")
        page = "data:text/html,<p id=a></p><script>a.textContent=6*7</script>"
        script = f"""
        HOME=/home/agent timeout 90 chromium --headless --no-sandbox --disable-gpu \
          --dump-dom '{page}' 2>/tmp/err || (cat /tmp/err; exit 1)
        """
        assert '<p id="a">42</p>' in await run(sandbox, script, user="agent")
