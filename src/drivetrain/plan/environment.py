"""The environment variables that a plan may set: takes a mapping, returns it or raises Problem.

A plan can come from a file or from another machine, so names that load code, name a file or select a device are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.outcomes import Problem

MAX_VALUE_LENGTH = 1024

# Exact names, not prefixes: NCCL_NET, NCCL_TUNER_PLUGIN, OMP_TOOL_LIBRARIES and CUDA_INJECTION64_PATH load libraries,
# TORCH_LOGS imports modules, TORCH_EXTENSIONS_DIR names a folder of code.
NAMES_BY_PREFIX = {
    "OMP_": "DYNAMIC MAX_ACTIVE_LEVELS NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE THREAD_LIMIT WAIT_POLICY",
    "GOMP_": "CPU_AFFINITY SPINCOUNT STACKSIZE",
    "KMP_": "AFFINITY BLOCKTIME DUPLICATE_LIB_OK HW_SUBSET LIBRARY TPAUSE USER_LEVEL_MWAIT",
    "MKL_": "CBWR DOMAIN_NUM_THREADS DYNAMIC ENABLE_INSTRUCTIONS NUM_STRIPES NUM_THREADS THREADING_LAYER",
    "ONEDNN_": "DEFAULT_FPMATH_MODE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY",
    "": "NUMEXPR_NUM_THREADS OPENBLAS_NUM_THREADS RAYON_NUM_THREADS TOKENIZERS_PARALLELISM VECLIB_MAXIMUM_THREADS",
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF HIP_ALLOC_CONF NO_CUDA_MEMORY_CACHING",
    "CUBLAS": "LT_WORKSPACE_SIZE _WORKSPACE_CONFIG",
    "CUDA_": "DEVICE_MAX_CONNECTIONS LAUNCH_BLOCKING MODULE_LOADING SCALE_LAUNCH_QUEUES",
    "NVIDIA_": "TF32_OVERRIDE",
    "TORCH_": "ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT CPP_LOG_LEVEL CUDNN_V8_API_LRU_CACHE_LIMIT DISTRIBUTED_DEBUG FR_BUFFER_SIZE"
    " SHOW_CPP_STACKTRACES",
    "TORCH_NCCL_": "ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BLOCKING_WAIT CUDA_EVENT_CACHE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING"
    " ENABLE_TIMING HEARTBEAT_TIMEOUT_SEC HIGH_PRIORITY NAN_CHECK TRACE_BUFFER_SIZE USE_COMM_NONBLOCKING WAIT_TIMEOUT_DUMP_MILSEC",
    "GLOO_": "SOCKET_IFNAME",
    "NCCL_": "ALGO ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CHECKS_DISABLE CHECK_POINTERS COLLNET_ENABLE CROSS_NIC CTA_POLICY"
    " CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_SUBSYS DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER IGNORE_CPU_AFFINITY LAUNCH_MODE"
    " LL_THRESHOLD MAX_CTAS MAX_NCHANNELS MAX_P2P_NCHANNELS MIN_CTAS MIN_NCHANNELS MIN_P2P_NCHANNELS MNNVL_ENABLE NET_GDR_LEVEL NET_GDR_READ"
    " NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS NVB_DISABLE NVLS_ENABLE NVLSTREE_MAX_CHUNKSIZE P2P_DIRECT_DISABLE"
    " P2P_DISABLE P2P_LEVEL P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE SET_STACK_SIZE SHM_DISABLE"
    " SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS TREE_THRESHOLD WORK_FIFO_BYTES",
    "NCCL_IB_": "ADAPTIVE_ROUTING ADDR_FAMILY ADDR_RANGE AR_THRESHOLD CUDA_SUPPORT DISABLE GID_INDEX HCA MERGE_NICS MERGE_VFS"
    " PCI_RELAXED_ORDERING PKEY QPS_PER_CONNECTION RETRY_CNT ROCE_VERSION_NUM SL SPLIT_DATA_ON_QPS TC TIMEOUT",
}  # fmt: skip
NAMES = frozenset(prefix + rest for prefix, words in NAMES_BY_PREFIX.items() for rest in words.split())


def is_plain(value: Any) -> bool:
    """Returns whether a variable's value is short ASCII text without control characters."""
    return isinstance(value, str) and len(value) <= MAX_VALUE_LENGTH and value.isascii() and value.isprintable()


def allowed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of an environment that a plan may set."""
    return {name: value for name, value in sorted(environment.items()) if name in NAMES and is_plain(value)}


def check_environment(env: Any) -> dict[str, str]:
    """Returns a plan's environment; raises Problem unless every name is allowed and every value is plain text."""
    if not isinstance(env, Mapping):
        raise Problem(f"plan.env: {str(env)[:80]!r} does not fit: it is an object of variables and their text")
    for name, value in env.items():
        if name not in NAMES:
            raise Problem(
                f"plan.env: {str(name)[:80]!r} is no variable that a plan may set (threads, allocator and network tuning only):"
                " leave it out of the plan, and set it in your shell if you want it"
            )
        if not is_plain(value):
            raise Problem(
                f"plan.env: {name}: {str(value)[:80]!r} does not fit: it is text of at most {MAX_VALUE_LENGTH} printable characters"
            )
    return dict(env)
