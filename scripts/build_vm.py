"""What scripts/build-vm runs: a Debian tree by mmdebstrap, then a disk that boots by UEFI.

The disk has an EFI system partition with systemd-boot, kernel and initramfs, and a root of ext4
that grows to the disk it finds itself on. A service of it starts the agent, which the host brings
on another disk. Nothing is mounted to make one: file systems are made with their content.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from build_base import bar, debootstrap, end_tidily, host_suite, scratch

from dsecd.config import load
from dsecd.host.sparse import copy_sparse
from libdsec.errors import DSecError, NotFound

KIB, MIB = 1 << 10, 1 << 20
ROOT_TYPE = "4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709"  # of x86-64 (Discoverable Partitions)
SYSTEM = (
    "dbus", "e2fsprogs", "iproute2", "kmod", "linux-image-amd64", "procps", "sudo",
    "systemd-boot-efi", "systemd-sysv", "udev", "zstd",
)  # fmt: skip
# fontconfig: without its cache each program reads all fonts first, a minute where it is emulated
DESKTOP = (
    "fontconfig", "fonts-dejavu-core", "openbox", "x11-utils", "xdotool", "xserver-xorg-core",
    "xserver-xorg-input-libinput", "xterm",
)  # fmt: skip
TOOLS = {"mkfs.vfat": "dosfstools", "mcopy": "mtools", "mke2fs": "e2fsprogs", "sfdisk": "fdisk"}
ESP_BYTES = 128 * MIB
SPARE_BYTES = 192 * MIB  # in the root, until it has grown
SECTOR = 512
USER = "user"
COMMAND_LINE = (
    "root=LABEL=dsec-root rw net.ifnames=0 console=ttyS0 tsc=reliable no_timer_check "
    "random.trust_cpu=on mitigations=off cryptomgr.notests systemd.show_status=no loglevel=4"
)
FILES = {
    "etc/fstab": "LABEL=dsec-root / ext4 defaults,discard,x-systemd.growfs 0 1\n",
    "etc/hostname": "dsec\n",
    "usr/lib/repart.d/50-root.conf": "[Partition]\nType=root-x86-64\n",
    # the host brings the agent, so that it is the one that its daemon knows
    "etc/systemd/system/run-dsec\\x2dseed.mount": """\
[Unit]
DefaultDependencies=no
Conflicts=umount.target
Before=umount.target

[Mount]
What=LABEL=cidata
Where=/run/dsec-seed
Type=vfat
Options=ro,umask=022
""",
    "etc/systemd/system/dsec-init.service": """\
[Unit]
Description=Agent of the sandbox
DefaultDependencies=no
RequiresMountsFor=/run/dsec-seed /var/lib
After=systemd-remount-fs.service systemd-tmpfiles-setup.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
ExecStart=/run/dsec-seed/dsec-init --service
Delegate=yes
OOMScoreAdjust=-1000

[Install]
WantedBy=sysinit.target
""",
}
DESKTOP_FILES = {
    # the screen has no GPU: what would draw on one costs seconds to find that out
    "etc/X11/xorg.conf.d/10-screen.conf": """\
Section "Module"
    Disable "glx"
EndSection
Section "Device"
    Identifier "screen"
    Driver "modesetting"
    Option "AccelMethod" "none"
EndSection
""",
    "etc/systemd/system/xserver.service": """\
[Unit]
Description=X server
After=systemd-udev-settle.service
Wants=systemd-udev-settle.service

[Service]
ExecStart=/usr/bin/Xorg :0 vt7 -nolisten tcp -noreset -ac -s 0 -dpms
Restart=always

[Install]
WantedBy=multi-user.target
""",
    "etc/systemd/system/openbox.service": f"""\
[Unit]
Description=Window manager
Requires=xserver.service
After=xserver.service

[Service]
User={USER}
Environment=DISPLAY=:0
ExecStart=/usr/bin/openbox
Restart=always
RestartSec=1

[Install]
WantedBy=multi-user.target
""",
}
# Before the kernel's package makes its initramfs: drivers of the disks that our machines have,
# instead of all there are.
INITRAMFS = r"""
set -e
mkdir -p "$1/etc/initramfs-tools/conf.d"
printf 'MODULES=list\nCOMPRESS=zstd\n' > "$1/etc/initramfs-tools/conf.d/dsec"
printf 'virtio_pci\nvirtio_blk\next4\n' >> "$1/etc/initramfs-tools/modules"
"""
# No timers that work on their own: each of them is a burst of CPU in every machine.
FINISH = rf"""
set -e
if [ -x "$1/usr/bin/fc-cache" ]; then # mke2fs writes whole seconds, and the cache is of a time
    find "$1/usr/share/fonts" "$1/usr/local/share/fonts" -type d -exec touch -d @1 {{}} +
    chroot "$1" fc-cache --force
fi
chroot "$1" useradd --create-home --shell /bin/bash {USER}
chroot "$1" systemctl enable --quiet UNITS
chroot "$1" systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer \
    e2scrub_all.timer fstrim.timer man-db.timer getty@tty1.service serial-getty@ttyS0.service \
    systemd-networkd-wait-online.service
chroot "$1" systemctl set-default --quiet multi-user.target
"""


def main() -> int:
    arguments = parse()
    end_tidily()
    try:
        build(arguments)
    except DSecError as error:
        print(f"build-vm: {error.message}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build-vm: {error.cmd[0]} failed ({error.returncode})", file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="build-vm", description="Make a disk image for full VMs: Debian with the agent."
    )
    parser.add_argument("name", help="name of the image, for example desktop")
    parser.add_argument(
        "--desktop", action="store_true", help="with X, a window manager, a terminal"
    )
    parser.add_argument("--suite", help="Debian release (default: this host's)")
    parser.add_argument("--packages", default="", help="further packages, comma-separated")
    parser.add_argument(
        "--to", type=Path, help="directory (default: images of the state directory)"
    )
    parser.add_argument("--force", action="store_true", help="build although the image exists")
    return parser.parse_args()


def build(arguments: argparse.Namespace) -> None:
    """Build the image. Raises `DSecError`, `CalledProcessError`."""
    folder = arguments.to or load().state / "vm" / "images"
    image = folder / f"{arguments.name}.raw"
    if image.exists() and not arguments.force:
        print(f"{image} exists; --force builds it again")
        return
    check_host()
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    packages = {*SYSTEM, *filter(None, arguments.packages.split(","))}
    if arguments.desktop:
        packages |= {*DESKTOP}
    with scratch() as place, bar() as progress:
        root = place / "root"
        hooks = write_hooks(place, desktop=arguments.desktop)
        suite = arguments.suite or host_suite()
        debootstrap(suite, sorted(packages), place, root, progress, hooks)
        task = progress.add_task("disk", total=None)
        assemble(root, place, place / "disk")
        new = image.with_suffix(".new")
        copy_sparse(place / "disk", new)
        new.chmod(0o644)
        new.rename(image)
        progress.update(task, total=1, completed=1)
    print(f"{image}: {image.stat().st_blocks * SECTOR // MIB} MiB")


def check_host() -> None:
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if shutil.which("mmdebstrap") is None:
        missing.append("mmdebstrap")
    if missing:
        raise NotFound(f"tools are missing: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise NotFound("run it as root: files of the image belong to many users")


def write_hooks(place: Path, *, desktop: bool) -> list[str]:
    """Write what mmdebstrap is to run, and return its options."""
    files = place / "files"
    for name, text in {**FILES, **(DESKTOP_FILES if desktop else {})}.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text)
    units = ["dsec-init.service", *(["xserver.service", "openbox.service"] if desktop else [])]
    (place / "initramfs").write_text(INITRAMFS)
    (place / "finish").write_text(FINISH.replace("UNITS", " ".join(units)))
    run = {name: shlex.quote(str(place / name)) for name in ("files", "initramfs", "finish")}
    return [
        f'--essential-hook=sh {run["initramfs"]} "$1"',
        f'--customize-hook=cp -RT {run["files"]} "$1"',
        f'--customize-hook=sh {run["finish"]} "$1"',
    ]


def assemble(root: Path, place: Path, image: Path) -> None:
    """Make the disk `image` of the tree `root`. Raises `CalledProcessError`."""
    used = subprocess.run(["du", "-sk", str(root)], check=True, capture_output=True, text=True)
    root_bytes = -(-(int(used.stdout.split()[0]) * KIB * 108 // 100 + SPARE_BYTES) // MIB) * MIB
    esp, start = MIB, MIB + ESP_BYTES
    image.touch()
    os.truncate(image, start + root_bytes + MIB)  # the last MiB: the copy of the partition table
    table = f"label: gpt\nstart={esp // SECTOR}, size={ESP_BYTES // SECTOR}, type=uefi\n"
    table += f"start={start // SECTOR}, size={root_bytes // SECTOR}, type={ROOT_TYPE}\n"
    run("sfdisk", "--quiet", str(image), input=table)
    run("mke2fs", "-q", "-t", "ext4", "-L", "dsec-root", "-d", str(root),
        "-E", f"offset={start}", str(image), f"{root_bytes // KIB}k")  # fmt: skip
    system = place / "esp"
    system.touch()
    os.truncate(system, ESP_BYTES)
    run("mkfs.vfat", "-n", "ESP", str(system))
    entry = place / "dsec.conf"
    entry.write_text(f"title Debian\nlinux /vmlinuz\ninitrd /initrd\noptions {COMMAND_LINE}\n")
    (place / "loader.conf").write_text("timeout 0\neditor no\n")
    boot = root / "boot"
    files = {
        root / "usr/lib/systemd/boot/efi/systemd-bootx64.efi": "EFI/BOOT/BOOTX64.EFI",
        next(boot.glob("vmlinuz-*")): "vmlinuz",
        next(boot.glob("initrd.img-*")): "initrd",
        entry: "loader/entries/dsec.conf",
        place / "loader.conf": "loader/loader.conf",
    }
    for folder in ("EFI", "EFI/BOOT", "loader", "loader/entries"):
        run("mmd", "-i", str(system), f"::{folder}")
    for source, target in files.items():
        run("mcopy", "-i", str(system), str(source), f"::{target}")
    with system.open("rb") as read, image.open("r+b") as disk:
        disk.seek(esp)
        shutil.copyfileobj(read, disk, MIB)


def run(*command: str, input: str | None = None) -> None:
    subprocess.run(command, check=True, input=input, text=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
