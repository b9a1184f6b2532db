//! Counters in Prometheus's text format (<https://prometheus.io/docs/instrumenting/exposition_formats/>, version
//! 0.0.4).

use std::fmt::{Display, Write as _};
#[cfg(feature = "serve")]
use std::net::SocketAddr;

#[cfg(feature = "serve")]
use crate::{
    Result, Server, Threads, Token, check_exposure,
    listen::{Limits, serve_http},
};
#[cfg(feature = "serve")]
use axum::{Router, http::header, middleware, routing::get};

/// The `Content-Type` of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A page, written from the top down.
#[derive(Debug)]
pub struct Page {
    prefix: &'static str,
    families: Vec<Family>,
}

/// What a page has under one name.
#[derive(Debug)]
pub struct Family {
    /// The name, with the page's prefix.
    pub name: String,
    /// `counter` or `gauge`.
    pub kind: &'static str,
    /// What it is, for people.
    pub help: String,
    /// Its samples.
    pub samples: Vec<Sample>,
}

/// A value of a family.
#[derive(Debug)]
pub struct Sample {
    /// Names and values of its labels.
    pub labels: Vec<(String, String)>,
    /// A number, as it stands on the page.
    pub value: String,
}

impl Page {
    /// An empty page; `prefix` and `_` stand before every name.
    #[must_use]
    pub fn new(prefix: &'static str) -> Self {
        Self { prefix, families: Vec::new() }
    }

    /// Begins a family: `kind` is `counter` or `gauge`, and its samples follow.
    pub fn family(&mut self, name: &str, kind: &'static str, help: &str) {
        let name = format!("{}_{name}", self.prefix);
        self.families.push(Family { name, kind, help: help.to_owned(), samples: Vec::new() });
    }

    /// A sample of the family begun last, with its labels. Before the first family there is none to have it.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        if let Some(family) = self.families.last_mut() {
            family.samples.push(Sample { labels, value: value.to_string() });
        }
    }

    /// A counter of one sample without labels.
    pub fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help);
        self.sample(&[], value);
    }

    /// A gauge of one sample without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(&[], value);
    }

    /// What stands on the page, for another format.
    #[must_use]
    pub fn families(&self) -> &[Family] {
        &self.families
    }

    /// The page's text.
    #[must_use]
    pub fn into_text(self) -> String {
        let mut text = String::new();
        for Family { name, kind, help, samples } in self.families {
            // Writing to a string cannot fail.
            let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
            for Sample { labels, value } in samples {
                let labels: Vec<String> =
                    labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
                let labels =
                    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        }
        text
    }
}

/// Serves what `page` writes as `GET /metrics` at `addr`, where port 0 takes a free one, until the server is dropped.
///
/// # Errors
/// [`Error::BadSetting`](crate::Error::BadSetting) for an address beyond loopback without a token, under the name `what`;
/// [`Error::Listen`](crate::Error::Listen) if it cannot be had.
#[cfg(feature = "serve")]
pub fn serve<F>(what: &'static str, addr: SocketAddr, token: Option<String>, page: F) -> Result<Server>
where
    F: Fn() -> String + Clone + Send + Sync + 'static,
{
    check_exposure(what, addr, token.as_deref())?;
    let token = Token::new(token);
    let page = move || std::future::ready(([(header::CONTENT_TYPE, CONTENT_TYPE)], page()));
    let router = Router::new()
        .route("/metrics", get(page))
        .layer(middleware::from_fn(move |request, next| token.clone().check(request, next)));
    let threads = Threads { io: 1, blocking: 1 };
    Server::start("metrics-http", addr, threads, |listener, _| {
        Ok(serve_http(listener, Limits::default(), router))
    })
}

/// A label's value as the format wants it inside quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_labels_are_escaped_and_families_begin_with_help() {
        let mut page = Page::new("p");
        page.family("paused", "gauge", "Whether it is.");
        page.sample(&[("engine", "a\\\"\n"), ("host", "b")], 1);
        page.counter("versions_total", "Versions.", 2.5);
        let expected = "# HELP p_paused Whether it is.\n# TYPE p_paused gauge\n\
                        p_paused{engine=\"a\\\\\\\"\\n\",host=\"b\"} 1\n\
                        # HELP p_versions_total Versions.\n# TYPE p_versions_total counter\np_versions_total 2.5\n";
        assert_eq!(page.into_text(), expected);
    }
}
