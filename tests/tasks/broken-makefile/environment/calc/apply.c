#include "calc.h"

int apply(char operator, long a, long b, long *result) {
  int unused;
  switch (operator) {
  case '+': *result = a + b; return OK;
  case '-': *result = a - b; return OK;
  case '*': *result = a * b; return OK;
  case '/': *result = a / b; return OK;
  }
  return 1;
}
