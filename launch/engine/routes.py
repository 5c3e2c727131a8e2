"""Routed experts in as few bytes as they need: SGLang 0.5.23 answers with int32, four times too many.

They are narrowed where a reply's rows are gathered, before they go to the process that answers. Clients read
the width from the length.
"""

import inspect

import torch
from sglang.srt.state_capturer import routed_experts

CHUNK = 1024  # rows that are narrowed while the cache holds them


class NarrowCapturer(routed_experts.RoutedExpertsCapturer):
    """Gathers uint8 for up to 256 experts; above, int16, whose bytes are uint16's (torch cannot pickle that)."""

    def __init__(self, model_config, **rest):
        super().__init__(model_config, **rest)
        self.num_experts = model_config.hf_text_config.num_experts
        self.narrow = torch.uint8 if self.num_experts <= 256 else torch.int16

    def get_topk(self, req_pool_idx, seqlen, req_to_token_pool, start_len=0) -> torch.Tensor:
        """Of tokens [start_len, seqlen - 1): [rows, layers, experts a token].

        A number that names no expert would become another's: such rows stay int32, for the client to refuse.
        """
        slots = req_to_token_pool.req_to_token[req_pool_idx][start_len : seqlen - 1].cpu()
        wide = self.host_cache.buffer
        experts = torch.empty((len(slots), *wide.shape[1:]), dtype=self.narrow)
        for begin in range(0, len(slots), CHUNK):
            # wide[slots] takes three times as long.
            rows = wide.index_select(0, slots[begin : begin + CHUNK])
            least, most = rows.aminmax()
            if least < 0 or most >= self.num_experts:
                return wide.index_select(0, slots)
            experts[begin : begin + CHUNK] = rows
        return experts


def install() -> None:
    """Raises AttributeError where SGLang does not make and ask its capturer as version 0.5.23 does."""
    original = routed_experts.RoutedExpertsCapturer
    if original.__name__ not in original.create.__code__.co_names:
        raise AttributeError("RoutedExpertsCapturer.create makes another class")
    asked, told = (inspect.signature(c.get_topk).parameters for c in (original, NarrowCapturer))
    if list(asked) != list(told):
        raise AttributeError(f"RoutedExpertsCapturer.get_topk takes {', '.join(asked)}")
    routed_experts.RoutedExpertsCapturer = NarrowCapturer
