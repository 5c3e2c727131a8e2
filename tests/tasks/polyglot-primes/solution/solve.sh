#!/bin/bash
set -e
cat >/app/poly/primes.c <<'END'
#if 0
import sys
n = int(sys.argv[1])
print(*[p for p in range(2, n + 1) if all(p % d for d in range(2, int(p**0.5) + 1))])
"""
#endif
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
  int n = atoi(words[1]), first = 1;
  for (int p = 2; p <= n; p++) {
    int prime = 1;
    for (int d = 2; d * d <= p; d++) prime = prime && p % d;
    if (prime) printf(first ? "%d" : " %d", p), first = 0;
  }
  puts("");
}
#if 0
"""
#endif
END
cd /app/poly
gcc -o primes primes.c
./primes 30
rm primes
