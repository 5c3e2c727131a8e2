# The assertions of generated verifiers: `check NAME PREDICATE...` notes one, `report` writes the results.
# Bash builtins where they serve: a verifier takes milliseconds. What a file holds is only ever compared,
# never run, and a text of more than 4096 characters or with a NUL fails.
shopt -s nullglob dotglob
names=() statuses=() failed=0 body=
declare -A modes

exists() { [[ -f $1 && ! -L $1 ]]; }
absent() { [[ ! -e $1 && ! -L $1 ]]; }

# Standard input into `body`, without its last newline.
load() { ! IFS= read -rd '' -n 4096 body && body=${body%$'\n'}; }
text() { exists "$1" && [[ -r $1 ]] && load <"$1"; }
holds() { text "$1" && [[ $body == "$2" ]]; }
says() { text "$1" && [[ $'\n'$body$'\n' == *$'\n'"$2"$'\n'* ]]; }
lacks() { text "$1" && [[ $'\n'$body$'\n' != *$'\n'"$2"$'\n'* ]]; }
lines() { text "$1" && body=${body//[!$'\n']/} && ((${#body} + 1 == $2)); }
ordered() {
  local line before=
  text "$1" || return
  while IFS= read -r line; do
    [[ $line < $before ]] && return 1
    before=$line
  done <<<"$body"
}
distinct() {
  local line
  text "$1" && body+=$'\n' || return
  while [[ $body ]]; do
    line=${body%%$'\n'*} body=${body#*$'\n'}
    [[ $'\n'$body == *$'\n'"$line"$'\n'* ]] && return 1
  done
  return 0
}

# mode PATH PATTERN: three octal digits, ? for any
mode() { exists "$1" && [[ ${modes[$1]:=$(stat -c %a "$1")} == $2 ]]; }
# packs ARCHIVE MEMBER TEXT
packs() { exists "$1" && load < <(tar -xOf "$1" "$2") && [[ $body == "$3" ]]; }
# members ARCHIVE FIRST SECOND: these two and no more, in any order
members() { exists "$1" && load < <(tar -tf "$1") && [[ $body == "$2"$'\n'"$3" || $body == "$3"$'\n'"$2" ]]; }
# only NAME...: the work folder holds these, given in order, and no more
only() {
  local found=(*)
  ((${#found[@]} == $#)) && [[ ${found[*]} == "$*" ]]
}

check() {
  names+=("$1")
  if [[ $PWD == /app ]] && "${@:2}" 2>/dev/null; then
    statuses+=(passed)
  else
    statuses+=(failed) failed=$((failed + 1))
  fi
}

report() {
  local i n=${#names[@]} tests=''
  for ((i = 0; i < n; i++)); do
    tests+=",{\"name\":\"${names[i]}\",\"status\":\"${statuses[i]}\",\"duration\":0}"
  done
  printf '{"results":{"tool":{"name":"checks"},"summary":{"tests":%d,"passed":%d,"failed":%d,"pending":0,"skipped":0,"other":0,"start":0,"stop":0},"tests":[%s]}}\n' \
    "$n" $((n - failed)) "$failed" "${tests#,}" >/logs/verifier/ctrf.json
  echo $((failed == 0)) >/logs/verifier/reward.txt
}
