"""Measures what a vLLM-Omni server spends on its own log stats: CPU time of the threads inside their functions.

On PYTHONPATH of a server. Each of its processes writes the nanoseconds that it has spent so far to a file of its own
in the folder OWN_STATS, twice a second. The clock reads count, too: some 1 % here.
"""

import functools
import importlib.abc
import os
import sys
import threading
import time

# Module, class, and those of its functions that run only with log stats on; of each call the outermost is timed.
FUNCTIONS = {
    "vllm.v1.core.sched.scheduler": ("Scheduler", ["make_stats"]),
    "vllm.v1.metrics.loggers": ("PrometheusStatLogger", ["record"]),
    "vllm.v1.metrics.stats": (
        "IterationStats",
        ["__init__", "update_from_output", "update_from_events", "update_from_finished_request"],
    ),
    "vllm_omni.metrics.prometheus": (
        "OmniPrometheusMetrics",
        [
            "set_running",
            "set_waiting",
            "observe_tokens",
            "request_succeeded",
            "observe_stage_gen_time",
            "observe_queue_wait",
            "set_stage_waiting_requests",
        ],
    ),
    "vllm_omni.metrics.stats": (
        "OrchestratorAggregator",
        ["on_stage_metrics", "on_finalize_request", "build_and_log_summary"],
    ),
}

spent_ns = 0
lock = threading.Lock()
thread = threading.local()


def timed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        global spent_ns
        if getattr(thread, "inside", False):
            return function(*args, **kwargs)
        thread.inside = True
        start = time.thread_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            spent = time.thread_time_ns() - start
            thread.inside = False
            with lock:
                spent_ns += spent

    return call


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules as all others do, and times their functions once they are loaded."""

    def find_spec(self, name, path, target=None):
        if name not in FUNCTIONS:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec), None)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_and_time(module):
            load(module)
            class_name, functions = FUNCTIONS[name]
            owner = getattr(module, class_name)
            for function in functions:
                # A name that is no more must not go unnoticed: the figure would be too small.
                setattr(owner, function, timed(vars(owner)[function]))

        spec.loader.exec_module = load_and_time
        return spec


def write():
    path = os.path.join(os.environ["OWN_STATS"], str(os.getpid()))
    while True:
        time.sleep(0.5)
        with open(path + ".new", "w") as file:
            file.write(str(spent_ns))
        os.replace(path + ".new", path)


if "OWN_STATS" in os.environ:
    sys.meta_path.insert(0, Finder())
    threading.Thread(target=write, daemon=True).start()
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=write, daemon=True).start())
