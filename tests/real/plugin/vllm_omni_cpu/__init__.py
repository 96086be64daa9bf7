"""vLLM-Omni on a CPU, for tests: a platform plug-in found through the `vllm_omni.platform_plugins` entry point.

It is put on PYTHONPATH, not installed; the servers themselves stay as PyPI ships them.
"""


def platform_class():
    """The platform's class path, as vLLM's plug-in loader wants it."""
    return "vllm_omni_cpu.platform.CpuOmniPlatform"
