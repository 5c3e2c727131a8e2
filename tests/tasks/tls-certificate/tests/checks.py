import hashlib
import re
import ssl
import stat
import subprocess
import time
from pathlib import Path

FOLDER = Path("/app/tls")


def openssl(*arguments):
    done = subprocess.run(("/usr/bin/openssl", *arguments), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def certificate(*options):
    return openssl("x509", "-in", FOLDER / "cert.pem", "-noout", *options)


def private(name):
    return stat.S_IMODE((FOLDER / name).lstat().st_mode) == 0o600


def test_key():
    assert "BEGIN PRIVATE KEY" in (FOLDER / "key.pem").read_text() and private("key.pem")
    assert "NIST CURVE: P-256" in openssl("pkey", "-in", FOLDER / "key.pem", "-noout", "-text")


def test_certificate_is_of_the_key_and_signed_by_it():
    key = openssl("pkey", "-in", FOLDER / "key.pem", "-pubout")
    assert certificate("-pubkey") == key
    openssl("verify", "-CAfile", FOLDER / "cert.pem", FOLDER / "cert.pem")
    assert "Signature Algorithm: ecdsa-with-SHA256" in certificate("-text")


def test_subject():
    name = certificate("-subject", "-nameopt", "RFC2253").strip()
    fields = {"CN=gate.example.test", "O=Harbour Office", "C=NL"}
    assert set(name.removeprefix("subject=").split(",")) == fields


def test_validity():
    begins, ends = (
        ssl.cert_time_to_seconds(certificate(which).partition("=")[2].strip())
        for which in ("-startdate", "-enddate")
    )
    assert ends - begins == 90 * 86400 and abs(time.time() - begins) < 3600


def test_alternative_names():
    names = certificate("-ext", "subjectAltName").splitlines()[1].split(",")
    asked = ["DNS:gate.example.test", "DNS:localhost", "IP Address:127.0.0.1"]
    assert sorted(n.strip() for n in names) == asked


def test_it_is_no_authority():
    assert "CA:FALSE" in certificate("-ext", "basicConstraints")


def test_bundle():
    parts = [(FOLDER / name).read_text() for name in ("key.pem", "cert.pem")]
    assert (FOLDER / "bundle.pem").read_text() == "".join(parts) and private("bundle.pem")


def test_fingerprint():
    encoded = ssl.PEM_cert_to_DER_cert((FOLDER / "cert.pem").read_text())
    digest = hashlib.sha256(encoded).hexdigest()
    assert re.fullmatch(rf"{digest}\n?", (FOLDER / "fingerprint.txt").read_text())
