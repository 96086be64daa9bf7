"""Times prometheus_client.generate_latest on the content of a page.

usage: render.py PAGE ROUNDS, with prometheus_client installed. Prints milliseconds, one round a line.

The page's families are rebuilt as the client library's own counters, gauges and histograms, so that what is timed is
what a server does for each scrape.
"""

import pathlib
import sys
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def rebuild(page: str) -> CollectorRegistry:
    disable_created_metrics()
    registry = CollectorRegistry()
    for family in text_string_to_metric_families(page):
        children: dict[tuple, dict] = {}
        for sample in family.samples:
            labels = dict(sample.labels)
            bound = labels.pop("le", None)
            child = children.setdefault(tuple(sorted(labels.items())), {})
            if bound is not None:
                child.setdefault("bounds", []).append(float(bound))
            child[sample.name.rsplit("_", 1)[-1]] = sample.value
        names = sorted({name for labels in children for name, _ in labels})
        if family.type == "histogram" and children:
            bounds = next(iter(children.values()))["bounds"]
            metric = Histogram(family.name, family.documentation, names, registry=registry, buckets=bounds)
        elif family.type == "counter":
            metric = Counter(family.name, family.documentation, names, registry=registry)
        else:
            metric = Gauge(family.name, family.documentation, names, registry=registry)
        for labels, child in children.items():
            bound = metric.labels(**dict(labels)) if labels else metric
            if family.type == "histogram":
                bound.observe(child["sum"] / max(child["count"], 1))
            elif family.type == "counter":
                bound.inc(max(child.popitem()[1], 0))
            else:
                bound.set(child.popitem()[1])
    return registry


def main() -> None:
    registry = rebuild(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = sum(1 for line in generate_latest(registry).decode().splitlines() if line and line[0] != "#")
    print(lines)
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter()
        generate_latest(registry)
        print((time.perf_counter() - start) * 1e3, flush=True)


if __name__ == "__main__":
    main()
