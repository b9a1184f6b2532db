"""Reads an export request in JSON by OpenTelemetry's own classes, which refuse fields that they do not know."""

import json
import sys

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

[told] = Parse(sys.stdin.read(), ExportMetricsServiceRequest()).resource_metrics
metrics = {}
for metric in told.scope_metrics[0].metrics:
    kind = metric.WhichOneof("data")
    if kind == "sum":
        assert metric.sum.is_monotonic
        assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    point = getattr(metric, kind).data_points[0]
    shown = "cumulative sum" if kind == "sum" else kind
    metrics[metric.name] = {"kind": shown, "value": point.as_double, "at": point.time_unix_nano}
resource = {pair.key: pair.value.string_value for pair in told.resource.attributes}
print(json.dumps({"resource": resource, "metrics": metrics}))
