//! The kinds of engines, by their addresses.

use std::sync::Arc;

use driftless_store::redact;

use crate::engine::{ClientOptions, Engine};
use crate::error::{Error, Result};
use crate::http;
use crate::keys::Keys;
use crate::sglang;
use crate::vllm;

type Connect = fn(&str, ClientOptions) -> Result<Arc<dyn Engine>>;

/// How an address of each kind begins, and what makes a client of the rest. An address without a kind is the
/// first's.
const KINDS: [(&str, Connect); 2] = [
    ("sglang+", |address, options| Ok(Arc::new(sglang::Client::new(address, options)?))),
    ("vllm+", |address, options| Ok(Arc::new(vllm::Client::new(address, options)?))),
];

/// A client of the engine at an address: `host:port`, `http://host:port` or `https://host` for SGLang,
/// `vllm+http://host:port` or `vllm+https://host` for vLLM. Calls go below the address's path, if it has one. Nothing is
/// sent yet.
///
/// # Errors
/// [`Error::Address`] for any other form of address.
pub fn connect(address: &str, options: ClientOptions) -> Result<Arc<dyn Engine>> {
    let (connect, rest) = kind_of(address);
    connect(rest, options)
}

/// What makes a client, and the address without the kind.
fn kind_of(address: &str) -> (Connect, &str) {
    let named = KINDS.iter().find_map(|(prefix, connect)| Some((*connect, address.strip_prefix(prefix)?)));
    named.unwrap_or((KINDS[0].1, address))
}

impl Keys {
    /// Those of the engines' addresses to which a key would go in clear text: over plain HTTP, to another host. Whoever is
    /// on the way reads it there; `https://` addresses end that.
    ///
    /// # Errors
    /// As [`connect`](crate::connect).
    pub fn in_clear<'a>(&self, addresses: &'a [String]) -> Result<Vec<&'a str>> {
        if self.control().is_none() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for address in addresses {
            if http::is_in_clear(kind_of(address).1)? {
                found.push(address.as_str());
            }
        }
        Ok(found)
    }
}

/// An SGLang client of the engine at an address, for what only SGLang can do: taking pushes.
///
/// # Errors
/// As [`connect`]; for an address of another kind too.
pub(crate) fn connect_sglang(address: &str, options: ClientOptions) -> Result<sglang::Client> {
    let (sglang, others) = (KINDS[0].0, &KINDS[1..]);
    if others.iter().any(|(prefix, _)| address.starts_with(prefix)) {
        let reason = "weights are pushed into SGLang engines only".to_owned();
        return Err(Error::Address { url: redact(address), reason });
    }
    sglang::Client::new(address.strip_prefix(sglang).unwrap_or(address), options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_each_kind_by_its_prefix() {
        for (address, url, kind) in [
            ("a:1", "http://a:1", "sglang"),
            ("http://a:1", "http://a:1", "sglang"),
            ("sglang+http://a:1", "http://a:1", "sglang"),
            ("vllm+http://a:1", "http://a:1", "vllm"),
            ("vllm+a:1/", "http://a:1", "vllm"),
            ("vllm+https://a/b/", "https://a/b", "vllm"),
        ] {
            let engine = connect(address, ClientOptions::default()).unwrap();
            assert_eq!(engine.url(), url, "{address}");
            assert_eq!(engine.kind(), kind, "{address}");
        }
        for address in ["vllm+", "vllm+ftp://a:1", "tgi+http://a:1", "vllm+sglang+http://a:1"] {
            let refused = connect(address, ClientOptions::default());
            assert!(matches!(refused, Err(Error::Address { .. })), "{address}");
        }
        assert!(connect_sglang("sglang+http://a:1", ClientOptions::default()).is_ok());
        let refused = connect_sglang("vllm+http://a:1", ClientOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("SGLang engines only"), "{refused}");
    }

    #[test]
    fn in_clear_names_addresses_only_where_there_is_a_key() {
        let addresses = ["vllm+http://a:1", "https://b", "127.0.0.1:1"].map(str::to_owned);
        for keys in [Keys::new(Some("x"), None), Keys::new(None, Some("x"))] {
            assert_eq!(keys.unwrap().in_clear(&addresses).unwrap(), ["vllm+http://a:1"]);
        }
        assert!(Keys::default().in_clear(&addresses).unwrap().is_empty());
    }
}
