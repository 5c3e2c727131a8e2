"""The walls of the sandbox: the machine beneath it, its daemon, its network, its neighbours."""

import functools

from attacks.attack import against
from attacks.files import TASK, WORK

attack = functools.partial(against, TASK, work=WORK)


def reached(*addresses: str) -> str:
    """A connection to any of these is a breach."""
    tries = (f"timeout 1 bash -c '>/dev/tcp/{a}' 2>/dev/null && echo BREACH {a}" for a in addresses)
    return "; ".join((*tries, "true"))


ATTACKS = {
    "mounts": attack(
        "mount -t tmpfs x /mnt && echo BREACH; mount --bind / /mnt && echo BREACH; umount /proc && echo BREACH",
        "mkdir /opt/c; mount -t cgroup -o memory x /opt/c && echo BREACH",
        "mount -t proc p /mnt && echo BREACH; mount -o remount,rw /proc/sys && echo BREACH; true",
    ),
    "kernel-settings": attack(
        "echo '|/opt/forge' >/proc/sys/kernel/core_pattern && echo BREACH; true",
        "echo /opt/forge >/proc/sys/kernel/modprobe && echo BREACH; true",
        "echo b >/proc/sysrq-trigger && echo BREACH; echo 1 >/proc/sys/kernel/panic && echo BREACH",
        "for f in /sys/kernel/uevent_helper /sys/fs/cgroup/*/release_agent; do echo /opt/forge >$f && echo BREACH; done; true",
    ),
    "core-dump": attack("ulimit -c unlimited && echo BREACH; bash -c 'kill -SEGV $$'; true"),
    "devices": attack(
        "mknod /opt/sda b 8 0 && echo BREACH; mknod /opt/mem c 1 1 && echo BREACH; mknod /opt/vda b 254 0 && echo BREACH",
        "ls /dev/sd* /dev/vd* /dev/nvme* /dev/kvm /dev/mem 2>/dev/null && echo BREACH; true",
        "mkdir -p /logs/verifier; mknod /logs/verifier/reward.txt c 1 3 && echo BREACH; true",
    ),
    "namespaces": attack(
        "unshare -U true && echo BREACH; unshare -m true && echo BREACH; unshare -rn true && echo BREACH",
        "nsenter -t 1 -m -p true && echo BREACH; chroot /proc/1/root true && echo BREACH; true",
    ),
    "host-processes": attack(
        "(($(ls -d /proc/[0-9]* | wc -l) > 20)) && echo BREACH; grep -l dockerd /proc/*/comm && echo BREACH",
        "cat /proc/1/root/etc/hostname /proc/1/cwd/etc/hostname | grep -v sandbox; true",
        "cat /proc/kcore >/dev/null && echo BREACH; head -c 1 /proc/kmsg && echo BREACH; dmesg && echo BREACH; true",
    ),
    "host-files": attack(
        "find / -xdev -name 'canary-*' 2>/dev/null | grep . && echo BREACH",
        "cd /; ls ../../../../../../../work 2>/dev/null && echo BREACH; true",
        "find / -name docker.sock -not -path '/proc/*' 2>/dev/null | grep . && echo BREACH; true",
    ),
    "docker-socket": attack(
        "for s in /var/run/docker.sock /run/docker.sock /run/containerd/containerd.sock; do"
        " curl -s --unix-socket $s http://x/version && echo BREACH; done",
        reached("127.0.0.1/2375", "127.0.0.1/2376", "172.17.0.1/2375", "172.17.0.1/22"),
    ),
    "network": attack(
        reached("1.1.1.1/80", "8.8.8.8/53", "169.254.169.254/80", "172.17.0.1/80", "172.17.0.2/80"),
        "curl -s -m 2 http://169.254.169.254/ && echo BREACH; getent hosts example.com && echo BREACH",
        "grep -c : /proc/net/dev | grep -qx 1 || echo BREACH; true",
    ),
    "other-sockets": attack(
        "python3 - <<'END'\nimport socket\nfor f, k in ((17, 3), (2, 3), (10, 3)):\n"
        "  try: socket.socket(f, k); print('BREACH', f, k)\n  except OSError: pass\n"
        "for cid in (1, 2):\n  for port in (22, 80, 1024, 2375, 5000):\n"  # the hypervisor and what runs on it
        "    try: s = socket.socket(40, 1); s.settimeout(0.2); s.connect((cid, port)); print('BREACH', cid, port)\n"
        "    except OSError: pass\nEND",
    ),
    "system-calls": attack(
        "python3 - <<'END'\nimport ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for name, n in dict(reboot=169, swapon=167, init_module=175, kexec_load=246, bpf=321, keyctl=250,\n"
        "  add_key=248, userfaultfd=323, open_by_handle_at=304, perf_event_open=298, settimeofday=164,\n"
        "  pivot_root=155, acct=163, iopl=172, syslog=103, quotactl=179, setns=308).items():\n"
        "  if libc.syscall(n, 0, 0, 0, 0, 0, 0) >= 0: print('BREACH', name)\nEND",
    ),
    "capabilities": attack(
        "grep -q 'CapEff:.*00000000000000eb$' /proc/self/status || grep CapEff /proc/self/status",
        'python3 -c \'import os; os.chroot("/opt"); print("BREACH")\'; hostname x && echo BREACH',
        "nice -n -20 true 2>&1 | grep -q 'cannot set' || echo BREACH; chattr +i /app && echo BREACH; true",
    ),
    "disk": attack(
        "fallocate -l 64M /dev/shm/x; fallocate -l 256M big; truncate -s 100T sparse; ls -l sparse >/dev/null",
    ),
    "output": attack(
        "yes | head -c 300M",
        "head -c 100M /dev/urandom",
        "printf '\\0\\xff%.0s' {1..9999}",
        timeout_s=30.0,
    ),
}
