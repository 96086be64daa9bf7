"""Judges omnitap's exposition by Python's client: the same content has to give the same bytes.

Reads from standard input {"families", "ops", "text", "openmetrics"}, does the operations on the client's own
metrics, and compares. Prints the first differences and exits with 1 where there are any.
"""

import difflib
import json
import sys

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text


def client_registry(families, ops):
    registry = CollectorRegistry()
    metrics = {}
    for family in families:
        args = (family["name"], family["help"], family["labels"])
        if family["type"] == "histogram":
            metric = Histogram(*args, buckets=family["bounds"], registry=registry)
        else:
            metric = {"counter": Counter, "gauge": Gauge}[family["type"]](*args, registry=registry)
        metrics[family["name"]] = metric
    # The client prints children in the order of their creation, omnitap in that of their label text.
    children = {(op["family"], json.dumps(op["labels"], sort_keys=True)): op["labels"] for op in ops}
    for (family, text), labels in sorted(children.items()):
        metrics[family].labels(**labels)
    for op in ops:
        child = metrics[op["family"]].labels(**op["labels"])
        getattr(child, {"add": "inc", "set": "set", "observe": "observe"}[op["op"]])(op["value"])
    return registry


def compare(what, ours, theirs):
    if ours == theirs:
        return True
    diff = difflib.unified_diff(theirs.splitlines(), ours.splitlines(), "client", "omnitap", n=0, lineterm="")
    print(f"{what} differs:", *list(diff)[:40], sep="\n")
    return False


def parsed(families):
    """One line a sample, whatever the order of its labels."""
    lines = []
    for family in families:
        lines.append(f"{family.name} {family.type} {family.documentation}")
        lines += [f"{s.name} {sorted(s.labels.items())} {s.value}" for s in family.samples]
    return "\n".join(lines)


def main():
    case = json.load(sys.stdin)
    disable_created_metrics()
    registry = client_registry(case["families"], case["ops"])
    collected = parsed(registry.collect())
    ok = [
        compare("text", case["text"], generate_latest(registry).decode()),
        compare("OpenMetrics", case["openmetrics"], generate_openmetrics(registry, ALLOWUTF8).decode()),
        compare("parsed OpenMetrics", parsed(parse_openmetrics(case["openmetrics"])), collected),
        compare("parsed text", parsed(parse_text(case["text"])), collected),
    ]
    sys.exit(0 if all(ok) else 1)


main()
