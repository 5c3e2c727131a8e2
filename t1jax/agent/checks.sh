# The assertions of generated verifiers: `check NAME PREDICATE...` notes one, `report` writes the results.
# Bash builtins where they serve: a verifier takes milliseconds. What a file holds is only ever compared,
# and only its first 4096 characters are read.
shopt -s nullglob dotglob
names=() statuses=() failed=0 body=
declare -A modes

exists() { [[ -f $1 && ! -L $1 ]]; }
absent() { [[ ! -e $1 && ! -L $1 ]]; }

# The text of a file or of standard input into `body`, without its last newline; fails on NUL and excess.
load() { ! IFS= read -rd '' -n 4096 body && body=${body%$'\n'}; }
text() { exists "$1" && [[ -r $1 ]] && load <"$1"; }
holds() { text "$1" && [[ $body == "$2" ]]; }
says() { text "$1" && [[ $'\n'$body$'\n' == *$'\n'"$2"$'\n'* ]]; }
lacks() { text "$1" && [[ $'\n'$body$'\n' != *$'\n'"$2"$'\n'* ]]; }

lines() {
  local newlines=${body//[!$'\n']/}
  text "$1" && newlines=${body//[!$'\n']/} && ((${#newlines} + 1 == $2))
}
ordered() {
  local line before=
  text "$1" || return
  while IFS= read -r line; do
    [[ $line < $before ]] && return 1
    before=$line
  done <<<"$body"
}
distinct() {
  local rest line
  text "$1" && rest=$body$'\n' || return
  while [[ $rest ]]; do
    line=${rest%%$'\n'*} rest=${rest#*$'\n'}
    [[ $'\n'$rest == *$'\n'"$line"$'\n'* ]] && return 1
  done
  return 0
}

# mode PATH PATTERN: three octal digits, ? for any
mode() { exists "$1" && [[ ${modes[$1]:=$(stat -c %a "$1")} == $2 ]]; }
# packs ARCHIVE MEMBER TEXT
packs() { exists "$1" && load < <(tar -xOf "$1" "$2") && [[ $body == "$3" ]]; }
# packs_only ARCHIVE MEMBER...: in order of their names
packs_only() { shift_sorted "$@"; }
# only NAME...: in order of their names
only() {
  local found=(*)
  ((${#found[@]} == $#)) && [[ ${found[*]} == "$*" ]]
}
