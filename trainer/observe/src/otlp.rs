//! How a run is doing, for a collector of OpenTelemetry: `ExportMetricsServiceRequest` of
//! [OTLP/HTTP](https://opentelemetry.io/docs/specs/otlp/#otlphttp), in JSON.

use std::time::Duration;

use driftless_http::metrics::{Family, Page, Sample};
use driftless_http::{Client, Error, Result, parse_url};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use driftless_trainer::events::{Event, Fact, Sink};

use crate::prometheus::Prometheus;

/// How long a collector may take: less than the run waits at its end for what is told of it.
const DEADLINE: Duration = Duration::from_secs(2);
/// How long one that did not take a step is left alone.
const REST_MS: u64 = 30_000;
/// Bytes of its answer that are read.
const ANSWER_BYTES_MAX: u64 = 1 << 16;
/// `AGGREGATION_TEMPORALITY_CUMULATIVE`.
const CUMULATIVE: u8 = 2;

/// Sends the page that Prometheus would read to a collector, with each step. A collector that does not answer misses
/// steps, and holds up nothing else.
#[derive(Debug)]
pub struct Otlp {
    page: Prometheus,
    run: String,
    to: String,
    client: Client,
    /// When the first fact came, in milliseconds since 1970: since then counters count.
    begun_ms: Option<u64>,
    /// When the collector did not take a step, if it has taken none since.
    deaf_since_ms: Option<u64>,
}

impl Otlp {
    /// Of the run of this name, to the collector at `endpoint`, such as `http://127.0.0.1:4318`. `headers` are as in the
    /// variable `OTEL_EXPORTER_OTLP_HEADERS`: `name=value,name=value`, where values are percent-encoded.
    ///
    /// # Errors
    /// [`Error::BadUrl`] and [`Error::BadSetting`] for what is neither; [`Error::Start`].
    pub fn new(run: &str, endpoint: &str, headers: &str) -> Result<Self> {
        let mut url = parse_url("collector", endpoint)?;
        let is_whole = url.path().trim_end_matches('/').ends_with("/v1/metrics");
        if let Ok(mut path) = url.path_segments_mut()
            && !is_whole
        {
            path.pop_if_empty().extend(["v1", "metrics"]);
        }
        let client = Client::with_headers(read_headers(headers)?)?;
        let (page, to) = (Prometheus::new(run), url.to_string());
        Ok(Self { page, run: run.to_owned(), to, client, begun_ms: None, deaf_since_ms: None })
    }

    fn send(&mut self, begun_ms: u64, at_ms: u64) {
        let body = body(&self.run, &self.page.figures(), begun_ms, at_ms).to_string();
        let sent = parse_url("collector", &self.to)
            .and_then(|url| self.client.post(url, body.into_bytes(), ANSWER_BYTES_MAX, DEADLINE));
        let taken =
            sent.and_then(|answer| if answer.status.is_success() { Ok(()) } else { Err(answer.refusal()) });
        let was_deaf = std::mem::replace(&mut self.deaf_since_ms, taken.is_err().then_some(at_ms));
        match taken {
            Err(error) if was_deaf.is_none() => {
                tracing::warn!("the collector {} misses steps: {error}", self.to);
            }
            Ok(()) if was_deaf.is_some() => tracing::info!("the collector {} takes steps again", self.to),
            _ => {}
        }
    }
}

impl Sink for Otlp {
    fn take(&mut self, fact: &Fact) {
        self.page.take(fact);
        let begun_ms = *self.begun_ms.get_or_insert(fact.at_ms);
        let rests = self.deaf_since_ms.is_some_and(|since| fact.at_ms.saturating_sub(since) < REST_MS);
        if matches!(fact.event, Event::Step(_)) && !rests {
            self.send(begun_ms, fact.at_ms);
        }
    }
}

/// Names and values of headers.
fn read_headers(text: &str) -> Result<Vec<(String, String)>> {
    let header = |pair: &str| {
        let decoded = pair.split_once('=').and_then(|(name, value)| {
            Some((name.trim().to_owned(), percent_decode_str(value.trim()).decode_utf8().ok()?.into_owned()))
        });
        let expected = "name=value,name=value".to_owned();
        // Its value, and what has no name, may be a secret.
        let found = pair.split_once('=').map_or("a part without `=`", |(name, _)| name).to_owned();
        decoded.ok_or(Error::BadSetting { name: "OTEL_EXPORTER_OTLP_HEADERS", expected, found })
    };
    text.split(',').filter(|pair| !pair.trim().is_empty()).map(header).collect()
}

/// The request for a page. Times are milliseconds since 1970.
fn body(run: &str, page: &Page, begun_ms: u64, at_ms: u64) -> Value {
    let metrics: Vec<_> =
        page.families().iter().filter_map(|family| metric(family, begun_ms, at_ms)).collect();
    let resource = [attribute("service.name", "driftless"), attribute("driftless.run", run)];
    json!({"resourceMetrics": [{
        "resource": {"attributes": resource},
        "scopeMetrics": [{
            "scope": {"name": "driftless", "version": env!("CARGO_PKG_VERSION")},
            "metrics": metrics,
        }],
    }]})
}

/// A family, if it has a sample that the protocol can say.
fn metric(family: &Family, begun_ms: u64, at_ms: u64) -> Option<Value> {
    let nanoseconds = |ms: u64| format!("{ms}000000");
    let point = |sample: &Sample| {
        // JSON has no number for what is not finite.
        let value: f64 = sample.value.parse().ok().filter(|value: &f64| value.is_finite())?;
        let attributes: Vec<_> = sample.labels.iter().map(|(name, value)| attribute(name, value)).collect();
        Some(json!({
            "attributes": attributes, "asDouble": value,
            "startTimeUnixNano": nanoseconds(begun_ms), "timeUnixNano": nanoseconds(at_ms),
        }))
    };
    let points: Vec<_> = family.samples.iter().filter_map(point).collect();
    if points.is_empty() {
        return None;
    }
    let mut metric = json!({"name": family.name, "description": family.help});
    if family.kind == "counter" {
        let sum = json!({"dataPoints": points, "aggregationTemporality": CUMULATIVE, "isMonotonic": true});
        metric["sum"] = sum;
    } else {
        metric["gauge"] = json!({ "dataPoints": points });
    }
    Some(metric)
}

fn attribute(name: &str, value: &str) -> Value {
    json!({"key": name, "value": {"stringValue": value}})
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn headers_are_read_as_the_variable_has_them() {
        let read = read_headers("api-key=a%20b, x = 1=2,").unwrap();
        assert_eq!(read, [("api-key".to_owned(), "a b".to_owned()), ("x".to_owned(), "1=2".to_owned())]);
        assert!(read_headers("").unwrap().is_empty());
        for odd in ["key", "a=%FF"] {
            let refused = read_headers(odd).unwrap_err().to_string();
            assert!(refused.contains("OTEL_EXPORTER_OTLP_HEADERS") && !refused.contains("%FF"), "{refused}");
        }
        let refused = Otlp::new("r", "http://h", "a b=secret").unwrap_err().to_string();
        assert!(refused.contains("a b") && !refused.contains("secret"), "{refused}");
    }

    #[test]
    fn counters_and_gauges_are_what_the_protocol_has() {
        let mut page = Page::new("p");
        page.family("phase", "gauge", "Where.");
        page.sample(&[("engine", "e")], 1);
        page.sample(&[("engine", "f")], f64::NAN);
        page.family("of_none", "gauge", "Of nothing.");
        page.counter("lost_total", "How often.", 3);
        let body = body("r", &page, 1, 2);
        let metrics = &body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"];
        let points = &metrics[0]["gauge"]["dataPoints"];
        assert_eq!(points.as_array().map(Vec::len), Some(1), "one is no number");
        assert_eq!(points[0]["attributes"], json!([{"key": "engine", "value": {"stringValue": "e"}}]));
        assert_eq!(points[0]["timeUnixNano"], "2000000");
        assert_eq!(metrics[1]["name"], "p_lost_total");
        let sum = &metrics[1]["sum"];
        assert_eq!((&sum["isMonotonic"], &sum["aggregationTemporality"]), (&json!(true), &json!(2)));
        assert_eq!(
            (&sum["dataPoints"][0]["asDouble"], &sum["dataPoints"][0]["startTimeUnixNano"]),
            (&json!(3.0), &json!("1000000"))
        );
    }
}
