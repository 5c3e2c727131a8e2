"""(placeholder until written)"""


class StoreError(RuntimeError):
    pass
