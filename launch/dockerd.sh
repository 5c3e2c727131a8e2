#!/usr/bin/env bash
# A Docker daemon of our own, apart from any other on this machine. Idempotent; the last line printed is its URL.
#   bash launch/dockerd.sh          starts it unless it runs; needs root, installs docker.io on Debian and Ubuntu
#   bash launch/dockerd.sh stop     ends exactly this daemon and its containers
# DOCKERD_FOLDER (default .cache/docker) holds its data, socket, pid file and log.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "dockerd: $*" >&2; exit 1; }

folder=$(realpath -m "${DOCKERD_FOLDER:-.cache/docker}")
socket=$folder/docker.sock
[ ${#socket} -lt 104 ] || fail "$socket is too long for a socket's name: set DOCKERD_FOLDER to a shorter path"
mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9 # two test workers may start it at once

# The daemon's pid, if it runs: a pid file may outlive its process, whose number then goes to another.
running() {
  local pid
  pid=$(cat "$folder/docker.pid" 2>/dev/null) || return 1
  tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "--pidfile=$folder/docker.pid" && echo "$pid"
}

ready() { curl -sf --max-time 5 --unix-socket "$socket" http://localhost/_ping >/dev/null; }

if [ "${1:-}" = stop ]; then
  pid=$(running) || exit 0
  kill "$pid"
  for _ in $(seq 300); do
    [ -e "/proc/$pid" ] || exit 0
    sleep 0.1
  done
  fail "process $pid does not end; its log is $folder/dockerd.log"
fi
[ $# -eq 0 ] || fail "unknown argument $1 (none or stop)"

if ! running >/dev/null; then
  [ "$(id -u)" = 0 ] || fail "needs root: run it with sudo, or give T1JAX a daemon that runs"
  if ! command -v dockerd >/dev/null || ! command -v curl >/dev/null; then
    command -v apt-get >/dev/null || fail "dockerd or curl is missing and there is no apt-get: install Docker"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq docker.io iptables curl; } \
      >"$folder/install.log" 2>&1 || fail "apt-get could not install docker.io: see $folder/install.log"
  fi
  rm -f "$folder/docker.pid"
  setsid dockerd --host="unix://$socket" --pidfile="$folder/docker.pid" --data-root="$folder/data" \
    --exec-root="$folder/exec" >"$folder/dockerd.log" 2>&1 </dev/null 9>&- &
fi
for _ in $(seq 600); do
  ready && echo "unix://$socket" && exit 0
  sleep 0.1
done
fail "it did not get ready within 60 s: $(tail -n 1 "$folder/dockerd.log")"
