"""Parses a page of OpenMetrics from standard input as strictly as the reference parser does."""

import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families

samples = 0
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation, family.name
    samples += len(family.samples)
print(samples)
