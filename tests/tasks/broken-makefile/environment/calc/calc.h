enum { OK = 0, DIVISION_BY_ZERO = 2 };

/* Returns OK and sets *result, or says why not. */
int apply(char operator, long a, long b, long *result);
