# Process 1 of a docker sandbox: keeps the agent's shell, runs programs, kills. Builtins of bash alone, so
# nothing the agent puts in the place of a program is ever run by it. The kernel lets no process inside kill it;
# signals that bash would end by do nothing, and are as usual again in what it starts.
#
# Its standard input is this program, then the host's requests, one line each: "TOKEN FUNCTION ARGUMENTS",
# quoted for bash; the agent does not know the token. Answers are lines "NONCE WORD NUMBER" on
# standard output, between what the agent's programs write there. At the end of input, the host is gone.
# Descriptors: 7 is the shell's input, 8 is never readable, 9 takes the answers.
exec 2>/dev/null 9>&1 8<> <(:)
for name in $(compgen -e); do unset "$name"; done
LC_ALL=C
trap : HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM PROF IO SYS
set -m # a process group for each program: its `kill 0` ends there

nonce= workdir= environment=()
watched= # the pid whose end the host waits for
shell= folder= # the shell's pid, and where it starts
before= found=()

answer() { printf '%s %s %d\n' "$nonce" "$1" "$2"; }

# hello NONCE WORKDIR ENVIRONMENT...
hello() {
  nonce=$1 workdir=$2 folder=$2 environment=("${@:3}")
  answer done 0
}

# run NONCE LINE: has the shell read the line, which answers for itself; "gone" if the shell ends first.
run() {
  nonce=$1
  if ! [[ $shell ]] || ! kill -0 "$shell"; then
    start_shell
  fi
  remember
  watched=$shell
  if ((${#2} < 60000)); then # a pipe takes that much whether or not it is read
    printf '%s\n' "$2" >&7
  else
    printf '%s\n' "$2" >&7 &
  fi
}

# execute NONCE FOLDER COUNT ENVIRONMENT(of COUNT)... PROGRAM ARGUMENTS...: answers "gone" at its end.
execute() {
  nonce=$1
  remember
  (
    cd "${2:-$workdir}" || cd /
    export -n PWD OLDPWD
    export "${@:4:$3}"
    exec 2>&1 -- "${@:4+$3}"
  ) </dev/null 7>&- 8<&- 9>&- &
  watched=$!
}

# stop NONCE: kills what was started since the last request, with the shell if it was the shell's.
stop() {
  nonce=$1
  local round
  if [[ $watched && $watched == "$shell" ]]; then
    cd -P "/proc/$shell/cwd" && folder=$PWD
    cd / && shell=
  fi
  for round in {1..25}; do
    strangers
    if ((! ${#found[@]})); then
      break
    fi
    kill -STOP $watched "${found[@]}" # so that none goes on when what it waits for is killed
    kill -9 "${found[@]}"
    pause
  done
  if ((${#found[@]})); then # they multiply faster
    kill_all
  fi
  watched=
  answer killed 0
}

# end_agent NONCE: kills every process but this one; the number is how many will not die.
end_agent() {
  nonce=$1 watched= shell=
  kill_all
  answer done ${#found[@]}
}

# walk NONCE NAME...: how many of the folders /NAME, /NAME/NAME, ... are there, and no links.
walk() {
  local path= count=0 name
  nonce=$1 watched=
  for name in "${@:2}"; do
    path+=/$name
    [[ -d $path && ! -L $path ]] || break
    ((count += 1))
  done
  answer done $count
}

start_shell() {
  coproc stdin {
    cd "$folder" || cd /
    export -n OLDPWD
    export "${environment[@]}"
    exec "$BASH" --norc --noprofile -o pipefail >&9 2>&1 7>&- 8<&-
  }
  exec 7>&"${stdin[1]}" # a descriptor that subshells have, too
  shell=$! folder=$workdir
}

remember() {
  before=(/proc/[0-9]*)
  before=" ${before[*]#/proc/} "
}

# Sets `found` to the processes that were not there `before`, and the watched one; not those that are dead already.
strangers() {
  local pid stat
  found=()
  for pid in /proc/[0-9]*; do
    pid=${pid#/proc/}
    if [[ $pid == 1 || ($before == *" $pid "* && $pid != "$watched") ]]; then
      continue
    fi
    read -r stat <"/proc/$pid/stat" && [[ ${stat##*) } != [ZX]* ]] && found+=("$pid")
  done
}

kill_all() {
  local round
  before=' '
  for round in {1..250}; do
    kill -9 -1
    pause
    strangers
    if ((! ${#found[@]})); then
      break
    fi
  done
}

pause() { read -r -t 0.002 -u 8; }

# The end of the watched process, whoever its parent would have told.
watch() {
  if ! kill -0 "$watched"; then
    wait "$watched"
    answer gone $?
    if [[ $watched == "$shell" ]]; then
      shell=
    fi
    watched=
  fi
}

# serve TOKEN
serve() {
  cd /
  local token=$1 line= part code wait ms=2
  while :; do
    if [[ $watched ]]; then
      printf -v wait '0.%03d' $ms
      IFS= read -r -t $wait part
    else
      IFS= read -r part
    fi
    code=$?
    line+=$part
    if ((code > 128)); then
      [[ $watched ]] && watch
      ((ms = ms < 250 ? 2 * ms : 500))
    elif ((code)); then
      exit
    else
      if [[ $line == *"$token "* ]]; then # what the agent put before it does not matter
        eval "${line#*"$token "}"
      fi
      line= ms=2
    fi
  done
}
