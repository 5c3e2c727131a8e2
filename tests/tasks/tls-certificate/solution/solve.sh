#!/bin/bash
set -e
cd /app/tls
umask 077
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem
openssl req -x509 -new -key key.pem -sha256 -days 90 -out cert.pem \
  -subj "/C=NL/O=Harbour Office/CN=gate.example.test" \
  -addext "basicConstraints=critical,CA:FALSE" \
  -addext "subjectAltName=DNS:gate.example.test,DNS:localhost,IP:127.0.0.1"
cat key.pem cert.pem >bundle.pem
openssl x509 -in cert.pem -noout -fingerprint -sha256 |
  sed 's/.*=//; s/://g' | tr A-F a-f >fingerprint.txt
