"""Workers that give vLLM-Omni's model runners a CPU: the runner classes are vLLM-Omni's, the device is vLLM's."""

# First: it loads the shared-memory operators that later imports look for.
import vllm.v1.worker.cpu_worker as cpu_worker  # isort: skip
import contextlib
from unittest import mock

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _Event:
    """A CUDA event whose work is always done: CPU operators return when they have finished."""

    def __init__(self, *_args, **_kwargs):
        pass

    def record(self, *_args, **_kwargs):
        pass

    def wait(self, *_args, **_kwargs):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Stream:
    """A CUDA stream with nothing to wait for."""

    device = torch.device("cpu")

    def __init__(self, *_args, **_kwargs):
        pass

    def wait_stream(self, *_args, **_kwargs):
        pass

    def wait_event(self, *_args, **_kwargs):
        pass

    def synchronize(self):
        pass

    def record_event(self, *_args, **_kwargs):
        return _Event()


def _without_cuda():
    """The runners call these torch.cuda functions without asking which device they are on."""
    torch.Event = torch.cuda.Event = _Event
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_a, **_k: _Stream()
    torch.cuda.stream = lambda *_a, **_k: contextlib.nullcontext()
    torch.cuda.set_device = lambda *_a, **_k: None


class ArRunner(GPUARModelRunner, CPUModelRunner):
    """Runs an autoregressive stage."""


class GenerationRunner(GPUGenerationModelRunner, CPUModelRunner):
    """Runs a code2wav stage."""


class _Worker(OmniWorkerMixin, cpu_worker.CPUWorker):
    # The name under which vLLM-Omni looks for connector support.
    model_runner_cls = None

    def init_device(self):
        _without_cuda()
        self.use_v2_model_runner = False
        # vLLM's worker names its runner class as a module global.
        with mock.patch.object(cpu_worker, "CPUModelRunner", self.model_runner_cls):
            super().init_device()


class ArWorker(_Worker):
    """Worker of an autoregressive stage."""

    model_runner_cls = ArRunner


class GenerationWorker(_Worker):
    """Worker of a code2wav stage."""

    model_runner_cls = GenerationRunner
