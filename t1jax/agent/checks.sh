# Predicates for generated verifiers, and `check`, which runs one and notes the result.
# Bash builtins where they serve: a verifier takes milliseconds.
shopt -s nullglob dotglob
names=() statuses=() failed=0

regular() { [[ -f $1 && ! -L $1 && -r $1 ]]; }
holds() { regular "$1" && [[ $(head -c 4096 "$1") == "$2" ]]; }
contains() { regular "$1" && [[ $'\n'$(head -c 4096 "$1")$'\n' == *$'\n'"$2"$'\n'* ]]; }
absent() { [[ ! -e $1 && ! -L $1 ]]; }
mode() { regular "$1" && [[ $(stat -c %a "$1") == "$2" ]]; }
packs() { regular "$1" && [[ $(tar -xOf "$1" "$2" | head -c 4096) == "$3" ]]; }
prints() { regular "$1" && [[ $(timeout 5 bash "$1" </dev/null | head -c 4096) == "$2" ]]; }
only() {
  local found=(*) want=("$@")
  [[ ${found[*]} == "${want[*]}" ]]
}

check() {
  names+=("$1")
  if "${@:2}" 2>/dev/null; then statuses+=(passed); else statuses+=(failed) failed=$((failed + 1)); fi
}

report() {
  local i n=${#names[@]} separator='' tests=''
  for ((i = 0; i < n; i++)); do
    tests+="$separator{\"name\":\"${names[i]}\",\"status\":\"${statuses[i]}\",\"duration\":0}"
    separator=,
  done
  printf '{"results":{"tool":{"name":"checks"},"summary":{"tests":%d,"passed":%d,"failed":%d,"pending":0,"skipped":0,"other":0,"start":0,"stop":0},"tests":[%s]}}\n' \
    "$n" $((n - failed)) "$failed" "$tests" >/logs/verifier/ctrf.json
  echo $((failed == 0)) >/logs/verifier/reward.txt
}
