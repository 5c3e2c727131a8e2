#include <stdio.h>
#include "calc.h"

int main(int count, char **words) {
  long result;
  if (count != 4) return 1;
  int code = apply(words[2][0], atol(words[1]), atol(words[3]), &result);
  if (code == DIVISION_BY_ZERO) fprintf(stderr, "division by zero\n");
  if (code == OK) printf("%ld\n", result);
  return code;
}
