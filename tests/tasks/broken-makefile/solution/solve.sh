#!/bin/bash
set -e
cd /app/calc
sed -i '/int unused/d; s/\*result = a \/ b/if (b == 0) return DIVISION_BY_ZERO; *result = a \/ b/' apply.c
sed -i "s/case '\*'/case 'x'/" apply.c
sed -i '1i #include <stdlib.h>' main.c
cat >Makefile <<'END'
CFLAGS = -O1 -Wall -Werror

calc: main.o apply.o
	$(CC) -o $@ $^

main.o apply.o: calc.h

clean:
	rm -f calc main.o apply.o

.PHONY: clean
END
make
