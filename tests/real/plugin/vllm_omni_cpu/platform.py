"""The platform: vLLM's CPU platform with the additional methods that vLLM-Omni asks a platform for."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Stages run in the engine core's own process, on the host's CPU."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls):
        return "vllm_omni_cpu.worker.ArWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls):
        return "vllm_omni_cpu.worker.GenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls):
        return "vllm_omni/deploy"

    @classmethod
    def supports_torch_inductor(cls):
        return False

    @classmethod
    def get_torch_device(cls, local_rank=None):
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls):
        return 1

    @classmethod
    def get_device_version(cls):
        return None

    @classmethod
    def synchronize(cls):
        return None

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return psutil.virtual_memory().total

    @classmethod
    def get_free_memory(cls, device=None):
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device=None):
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def get_current_memory_usage(cls, device=None):
        return psutil.Process().memory_info().rss

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *_args, **_kwargs):
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum

        return DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()

    @classmethod
    def supports_diffusion_dense_flash_attention(cls):
        return False

    # What a diffusion worker asks its device's module of torch for: there is one device, and its memory is that of
    # the process.

    @classmethod
    def is_initialized(cls):
        return True

    @classmethod
    def current_device(cls):
        return 0

    @classmethod
    def set_device(cls, *_args):
        return None

    @classmethod
    def empty_cache(cls):
        return None

    @classmethod
    def reset_peak_memory_stats(cls, *_args):
        return None

    @classmethod
    def memory_allocated(cls, *_args):
        return cls.get_current_memory_usage()

    @classmethod
    def memory_reserved(cls, *_args):
        return cls.get_current_memory_usage()

    @classmethod
    def max_memory_allocated(cls, *_args):
        return cls.get_current_memory_usage()

    @classmethod
    def max_memory_reserved(cls, *_args):
        return cls.get_current_memory_usage()
