"""The system-call filter of the namespace sandbox: a deny-list as a classic BPF program, x86-64 only.

Denied calls fail with EPERM. What they have in common: they reach kernel code that no task needs (mounts,
modules, keyrings, BPF, io_uring, NUMA policy), or another process (ptrace, prlimit of somebody else), or
memory that no limit covers (memfd_create).
"""

import ctypes
import errno
import struct

DENIED = {
    "ptrace": 101,
    "syslog": 103,
    "uselib": 134,
    "sysfs": 139,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "_sysctl": 156,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "iopl": 172,
    "ioperm": 173,
    "create_module": 174,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "nfsservctl": 180,
    "lookup_dcookie": 212,
    "clock_settime": 227,
    "mbind": 237,
    "set_mempolicy": 238,
    "get_mempolicy": 239,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "migrate_pages": 256,
    "unshare": 272,
    "move_pages": 279,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "process_mrelease": 448,
}

# Allowed on oneself (this argument is 0), denied on any other process, the supervisor above all.
ONLY_ONESELF = {
    "setpriority": (141, 1),
    "sched_setparam": (142, 0),
    "sched_setscheduler": (144, 0),
    "ioprio_set": (251, 1),
    "prlimit64": (302, 0),
    "sched_setattr": (314, 0),
}

SOCKET, CLONE, CLONE3 = 41, 56, 435
FAMILIES = (
    1,
    2,
    10,
    16,
)  # unix, inet, inet6, netlink: vsock leaves a virtual machine, the rest is attack surface
NEW_NAMESPACE = 0x7E020000  # every CLONE_NEW* flag of clone()

X86_64 = 0xC000003E
X32_BIT = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
ALLOW = (RETURN, 0, 0, 0x7FFF0000)
KILL = (RETURN, 0, 0, 0x80000000)


def program() -> list[tuple[int, int, int, int]]:
    """The BPF instructions (code, jump if true, jump if false, operand)."""
    deny = (RETURN, 0, 0, 0x00050000 | errno.EPERM)
    missing = (RETURN, 0, 0, 0x00050000 | errno.ENOSYS)
    reload = (LOAD, 0, 0, NUMBER_AT)
    code = [(LOAD, 0, 0, ARCH_AT), (EQUAL, 1, 0, X86_64), KILL]
    code += [reload, (AT_LEAST, 0, 1, X32_BIT), deny]
    code += [(EQUAL, 0, 4, CLONE), _argument(0), (ANY_BIT, 0, 1, NEW_NAMESPACE), deny, reload]
    code += [(EQUAL, 0, 1, CLONE3), missing]  # flags lie in memory: libc falls back to clone()
    for number, argument in ONLY_ONESELF.values():
        code += [(EQUAL, 0, 4, number), _argument(argument), (EQUAL, 1, 0, 0), deny, reload]
    code += [(EQUAL, 0, len(FAMILIES) + 3, SOCKET), _argument(0)]
    code += [(EQUAL, len(FAMILIES) - i, 0, family) for i, family in enumerate(FAMILIES)]
    code += [deny, reload]
    for number in DENIED.values():
        code += [(EQUAL, 0, 1, number), deny]
    return [*code, ALLOW]


def install(libc: ctypes.CDLL) -> None:
    """Puts the filter on this process and all it will start. Needs no_new_privs. Raises OSError."""
    instructions = b"".join(struct.pack("HBBI", *i) for i in program())
    buffer = ctypes.create_string_buffer(instructions)
    header = struct.pack("HxxxxxxQ", len(instructions) // 8, ctypes.addressof(buffer))
    if libc.prctl(22, 2, header, 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp filter refused by the kernel")


def _argument(index: int) -> tuple[int, int, int, int]:
    """Loads the low 32 bits of a system call's argument."""
    return (LOAD, 0, 0, ARGUMENTS_AT + 8 * index)
