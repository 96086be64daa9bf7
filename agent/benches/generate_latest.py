"""Times prometheus_client.generate_latest on the content of an exposition file.

Usage: generate_latest.py FILE [ROUNDS]. Prints one JSON object: sample lines, and the median and least time of one
rendering in milliseconds.
"""

import json
import statistics
import sys
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def live(text):
    """The families as the client's own live metrics, with the same children."""
    registry = CollectorRegistry()
    for family in text_string_to_metric_families(text):
        samples = family.samples
        if not samples:
            continue
        names = sorted(set(samples[0].labels) - {"le"})
        if family.type == "histogram":
            bounds = dict.fromkeys(float(s.labels["le"]) for s in samples if "le" in s.labels)
            metric = Histogram(family.name, family.documentation, names, buckets=sorted(bounds), registry=registry)
        else:
            kind = {"counter": Counter, "gauge": Gauge}[family.type]
            metric = kind(family.name, family.documentation, names, registry=registry)
        for sample in samples:
            child = metric.labels(*[sample.labels[n] for n in names]) if names else metric
            if family.type == "counter":
                child.inc(sample.value)
            elif family.type == "gauge":
                child.set(sample.value)
            elif sample.name.endswith("_count"):
                child.observe(0.0213)
    return registry


def main():
    disable_created_metrics()
    with open(sys.argv[1], encoding="utf-8") as file:
        registry = live(file.read())
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 15
    lines = sum(not line.startswith(b"#") for line in generate_latest(registry).splitlines())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        generate_latest(registry)
        times.append((time.perf_counter() - start) * 1e3)
    print(json.dumps({"lines": lines, "median_ms": statistics.median(times), "min_ms": min(times)}))


main()
