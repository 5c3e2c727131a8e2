#!/usr/bin/env bash
# A base image without a registry: Debian bookworm with a compiler, Python and the usual tools, as t1jax/base:bookworm.
#   bash launch/base_image.sh [URL [NAME...]]      URL: unix:///path/docker.sock or tcp://host:port, default the
#                                                  daemon of launch/dockerd.sh; NAME: what Dockerfiles are FROM
# Idempotent. DOCKERD_FOLDER (default .cache/docker) keeps base.tar, of which a new daemon gets the image in seconds.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "base_image: $*" >&2; exit 1; }

folder=$(realpath -m "${DOCKERD_FOLDER:-.cache/docker}")
url=${1:-unix://$folder/docker.sock}
case "$url" in
  unix://*) to=(--unix-socket "${url#unix://}" http://localhost) ;;
  tcp://*) to=("http://${url#tcp://}") ;;
  *) fail "$url is neither unix://... nor tcp://..." ;;
esac
image=t1jax/base:bookworm
packages=bash,ca-certificates,coreutils,curl,gcc,git,libc6-dev,make,netcat-openbsd,openssl,procps
packages+=,python3,python3-pip,python3-pytest,sqlite3,tmux,util-linux,wget

there() { [ "$(curl -s -o /dev/null -w '%{http_code}' "${to[@]}/images/$image/json")" = 200 ]; }

mkdir -p "$folder"
exec 9>"$folder/base.lock"
flock 9 # two test workers may want it at once
# Lets Dockerfiles of tasks that are FROM the NAMEs build on it.
also_named() {
  for name in "$@"; do
    curl -sf -o /dev/null -X POST "${to[@]}/images/$image/tag?repo=${name%:*}&tag=${name##*:}" ||
      fail "the daemon at $url refused the name $name (it must be REPOSITORY:TAG)"
  done
}

if there; then
  also_named "${@:2}"
  exit 0
fi
if [ ! -e "$folder/base.tar" ]; then
  [ "$(id -u)" = 0 ] || fail "needs root to make $folder/base.tar"
  if ! command -v mmdebstrap >/dev/null; then
    command -v apt-get >/dev/null || fail "mmdebstrap is missing and there is no apt-get: install mmdebstrap"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap; } \
      >"$folder/install.log" 2>&1 || fail "apt-get could not install mmdebstrap: see $folder/install.log"
  fi
  # the machine's own certificates too: its network may be behind a proxy that signs anew
  mmdebstrap --variant=minbase --include="$packages" \
    --customize-hook='if [ -e /etc/ssl/certs/ca-certificates.crt ]; then
      cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/ca-certificates.crt"; fi' \
    --customize-hook='rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/*' \
    bookworm "$folder/base.part.tar" >"$folder/base.log" 2>&1 9>&- ||
    fail "mmdebstrap failed: $(tail -n 1 "$folder/base.log")"
  mv "$folder/base.part.tar" "$folder/base.tar"
fi
curl -sf -o /dev/null -X POST -H "Content-Type: application/x-tar" -T "$folder/base.tar" \
  "${to[@]}/images/create?fromSrc=-&repo=${image%:*}&tag=${image#*:}&changes=LABEL%20t1jax=base" ||
  fail "the daemon at $url did not take the image: does it run? (bash launch/dockerd.sh)"
there || fail "the daemon at $url has no $image after the import"
also_named "${@:2}"
