"""An SGLang 0.5.23 server; all flags are SGLang's own. Run by t1jax/rollout/server.py.

It ends when the thread that started it does, from its first moment on: ENGINE_PARENT names that thread's process.
It says what it serves at /text_config. Routed experts go out in one or two bytes each: see routes.py. With
"--device cpu" it runs on CPUs without AMX: SGLang's wheel expects CUDA kernels or those of the sgl-kernel wheel
for AMX, and plain torch is put in their place. The module is imported again in every process that SGLang
spawns, and patches it, too.
"""

import ctypes
import os
import signal
import sys
import types

PR_SET_PDEATHSIG = 1
if __name__ == "__main__":  # before the imports, which take seconds
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ["ENGINE_PARENT"]):
        sys.exit("who started this server has ended")

import delta_net  # noqa: E402
import torch  # noqa: E402

# Imported by SGLang on every CPU, used for speculative decoding alone.
UNUSED = (
    *("copy_all_layer_kv_cache_cpu", "assign_req_to_token_pool_cpu", "rotate_input_ids_cpu"),
    *(
        "fill_accept_out_cache_loc_cpu",
        "fill_bonus_tokens_cpu",
        "assign_draft_cache_locs_contiguous_cpu",
    ),
    *("assign_extend_cache_locs_cpu", "build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu"),
)


def missing(name: str):
    def kernel(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no version for this CPU")

    return kernel


def declare_torchvision_ops() -> None:
    """torchvision's wheel is built for CUDA's torch; importing it beside the CPU's needs these names only."""
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)


def install_kernels() -> None:
    """A `sgl_kernel` whose delta-net kernels are plain torch."""
    module = types.ModuleType("sgl_kernel")
    module.__version__, module.__path__ = "0.0.0", []
    for name in UNUSED:
        setattr(module, name, missing(name))
    mamba = types.ModuleType("sgl_kernel.mamba")
    for kernel in delta_net.MODULE_KERNELS:
        setattr(mamba, kernel.__name__, kernel)
    module.mamba = mamba
    sys.modules["sgl_kernel"], sys.modules["sgl_kernel.mamba"] = module, mamba
    for kernel in delta_net.OP_KERNELS:
        setattr(torch.ops.sgl_kernel, kernel.__name__, kernel)


def patch_sglang() -> None:
    """Plain memory for the routed-experts buffer; torch for two kernels that are Triton's."""
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.srt.mem_cache.pool_host import common

    def plain(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain
    layernorm_gated.RMSNorm.forward = delta_net.gated_rms_norm
    elementwise._launch_fused_gate_sigmoid_mul = delta_net.shared_expert_gate


def narrow_routes() -> None:
    try:
        import routes

        routes.install()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"launch/engine/routes.py does not fit this SGLang: {error}") from error


def tell_model() -> None:
    """A client compares the sizes before it sends weights: those of another model would end the server."""
    from sglang.srt.entrypoints import http_server

    @http_server.app.get("/text_config")
    async def text_config() -> dict:
        config = http_server._global_state.tokenizer_manager.model_config.hf_text_config
        return {k: v for k, v in config.to_dict().items() if isinstance(v, int | float | str)}


if "cpu" in sys.argv:
    declare_torchvision_ops()
    install_kernels()
    patch_sglang()
narrow_routes()

if __name__ == "__main__":
    tell_model()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
