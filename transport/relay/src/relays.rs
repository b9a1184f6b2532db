//! The follower's side: objects come from relays and are checked; everything else comes from the origin.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use derive_setters::Setters;
use driftless_http::{Client, parse_url};
use driftless_store::wait::lock;
use driftless_store::{ContentDigest, Entry, Key, Object, OnBytes, PutMode, Store, chain_text, redact};
use driftless_transport::Error as TransportError;
use reqwest::{StatusCode, Url};

use crate::error::Result;
use crate::fabric::{self, Fabric};
use crate::session::Remote;

/// Bytes that a relay is asked for at a time.
const REQUEST_BYTES: u64 = 8 << 20;
/// How long a relay may take for an object that it has to fetch first, and how many bytes a second are added
/// to that.
const PATIENCE: Duration = Duration::from_secs(10);
const BYTES_PER_SECOND_MIN: u64 = 2 << 20;
/// How long a relay that failed is left alone: doubled with every failure, up to the second.
const BACKOFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];
/// How long a relay that gave wrong bytes is left alone.
const DISTRUST: Duration = Duration::from_secs(600);
/// Objects of which it is remembered who gave them.
const REMEMBERED_MAX: usize = 1024;

/// A store whose objects come from relays, as far as these do what they should, and from the store itself
/// otherwise.
///
/// Which relay is asked for an object follows from the object's digest and the relays' names (rendezvous
/// hashing): all followers ask the same one, and each relay has its share. A relay that does not answer is
/// left alone for a while, one that gives wrong bytes for longer; the next one is asked meanwhile, the origin
/// last.
pub struct Relays {
    origin: Arc<dyn Store>,
    http: Client,
    relays: Vec<Peer>,
    /// Which relays have given ranges of an object.
    given: Mutex<BTreeMap<ContentDigest, BTreeSet<usize>>>,
}

struct Peer {
    url: Url,
    way: Way,
    health: Mutex<Health>,
}

/// How a relay is asked.
enum Way {
    Http,
    Fabric(Remote),
}

#[derive(Default)]
struct Health {
    failures: u32,
    not_before: Option<Instant>,
}

/// What a follower brings to relays.
#[derive(Clone, Default, Setters)]
#[setters(prefix = "with_", strip_option)]
#[non_exhaustive]
pub struct RelaysOptions {
    /// The bearer token that they are brought with every request.
    #[setters(into)]
    pub token: Option<String>,
    /// Fabrics that are open already. Another one that a URL names is opened with its own settings.
    pub fabrics: Vec<Arc<dyn Fabric>>,
}

impl Relays {
    /// The store `origin` behind relays at `urls`: `http://host:port`, and `<scheme>://host:port` for a
    /// [`fabric`](crate::fabric), such as `ucx://host:port`.
    ///
    /// # Errors
    /// [`BadUrl`](driftless_http::Error::BadUrl) or [`BadText`](driftless_transport::Error::BadText) for something that is
    /// no URL of a relay;
    /// [`Unsupported`](driftless_transport::Error::Unsupported) for UCX in a build without it, and
    /// [`Library`](crate::Error::Library) or [`Link`](crate::Error::Link) where it cannot be used.
    pub fn new(origin: Arc<dyn Store>, urls: &[String], options: RelaysOptions) -> Result<Self> {
        let RelaysOptions { token, mut fabrics } = options;
        let way = |text: &String| -> Result<Peer> {
            let (url, way) = match text.split_once("://") {
                Some((scheme, host)) if !scheme.starts_with("http") => {
                    let url = fabric_url(text, host)?;
                    let remote = Remote::new(opened(&mut fabrics, scheme, text)?, host, token.as_deref());
                    (url, Way::Fabric(remote))
                }
                _ => (parse_url("relay", text)?, Way::Http),
            };
            Ok(Peer { url, way, health: Mutex::default() })
        };
        let relays = urls.iter().map(way).collect::<Result<_>>()?;
        Ok(Self { origin, http: Client::new(token.as_deref())?, relays, given: Mutex::default() })
    }

    fn given(&self) -> MutexGuard<'_, BTreeMap<ContentDigest, BTreeSet<usize>>> {
        lock(&self.given)
    }

    /// The relays for an object, first choice first.
    fn order(&self, digest: &ContentDigest) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.relays.len()).collect();
        order.sort_by_cached_key(|&index| {
            Reverse(weight(digest, self.relays.get(index).map(|peer| &peer.url)))
        });
        order
    }

    /// A range from one relay.
    fn ask(
        &self,
        peer: &Peer,
        object: &Object,
        range: &Range<u64>,
        arrived: &OnBytes,
    ) -> std::result::Result<Vec<u8>, String> {
        let patience = PATIENCE + Duration::from_secs(object.size / BYTES_PER_SECOND_MIN);
        match &peer.way {
            Way::Fabric(remote) => return in_pieces(range, |piece| remote.get(object, piece, patience)),
            Way::Http => {}
        }
        let mut url = peer.url.clone();
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().push("objects").extend(object.key.segments());
        }
        url.set_query(Some(&format!("size={}&blake3={}", object.size, object.blake3)));
        in_pieces(range, |piece| {
            let header = format!("bytes={}-{}", piece.start, piece.end - 1);
            let asked = self.http.get(url.clone(), &header, piece.end - piece.start, arrived, patience);
            let answer = asked.map_err(|error| chain_text(&error))?;
            if answer.status != StatusCode::PARTIAL_CONTENT {
                return Err(chain_text(&answer.refusal()));
            }
            if answer.body.len() as u64 != piece.end - piece.start {
                return Err(format!("{} bytes instead of {}", answer.body.len(), piece.end - piece.start));
            }
            Ok(answer.body)
        })
    }
}

/// A range, by requests for parts of it.
fn in_pieces(
    range: &Range<u64>,
    get: impl Fn(Range<u64>) -> std::result::Result<Vec<u8>, String>,
) -> std::result::Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let end = range.end.min(start + REQUEST_BYTES);
        let piece = get(start..end)?;
        // The usual range is one piece.
        if bytes.is_empty() {
            bytes = piece;
        } else {
            bytes.extend_from_slice(&piece);
        }
        start = end;
    }
    Ok(bytes)
}

fn no_relay(text: &str) -> TransportError {
    let expected = "http://host:port, https://host:port or ucx://host:port";
    TransportError::BadText { what: "relay", text: redact(text), expected }
}

/// The URL of a relay that is asked over a fabric.
fn fabric_url(text: &str, host: &str) -> Result<Url> {
    // As a URL of HTTP it is held to the same rules.
    let plain = parse_url("relay", &format!("http://{host}")).ok();
    let url = plain.and(Url::parse(text).ok()).filter(|url| url.port().is_some());
    Ok(url.ok_or_else(|| no_relay(text))?)
}

/// The fabric of a scheme, opened for the first relay of it.
fn opened(fabrics: &mut Vec<Arc<dyn Fabric>>, scheme: &str, text: &str) -> Result<Arc<dyn Fabric>> {
    if let Some(opened) = fabrics.iter().find(|fabric| fabric.scheme() == scheme) {
        return Ok(opened.clone());
    }
    let opened = fabric::open(scheme).ok_or_else(|| no_relay(text))??;
    fabrics.push(opened.clone());
    Ok(opened)
}

/// How much a relay is one for this object; `None` for no relay.
fn weight(digest: &ContentDigest, url: Option<&Url>) -> Option<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(digest.as_bytes()).update(url?.as_str().as_bytes());
    Some(*hasher.finalize().as_bytes())
}

impl Peer {
    fn health(&self) -> MutexGuard<'_, Health> {
        lock(&self.health)
    }

    fn is_due(&self) -> bool {
        self.health().not_before.is_none_or(|time| time <= Instant::now())
    }

    fn succeeded(&self) {
        let mut health = self.health();
        // What was distrusted meanwhile stays so.
        if health.not_before.is_none_or(|time| time <= Instant::now()) {
            *health = Health::default();
        }
    }

    fn failed(&self, key: &Key, error: &str) {
        let mut health = self.health();
        let wait = driftless_store::wait::backoff(BACKOFF[0], BACKOFF[1], health.failures);
        health.failures = health.failures.saturating_add(1);
        health.not_before = health.not_before.max(Some(Instant::now() + wait));
        tracing::warn!(relay = %self.url, %key, error, wait_s = wait.as_secs(), "the relay is left alone for a while");
    }

    fn lied(&self, key: &Key) {
        self.health().not_before = Some(Instant::now() + DISTRUST);
        tracing::warn!(relay = %self.url, %key, wait_s = DISTRUST.as_secs(), "the relay gave wrong bytes");
    }
}

impl fmt::Display for Relays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.origin.fmt(f)
    }
}

impl fmt::Debug for Relays {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<&str> = self.relays.iter().map(|peer| peer.url.as_str()).collect();
        f.debug_struct("Relays").field("origin", &self.origin).field("relays", &urls).finish_non_exhaustive()
    }
}

#[deny(clippy::missing_trait_methods)]
impl Store for Relays {
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> driftless_store::Result<()> {
        self.origin.put(key, bytes, mode)
    }

    fn get(&self, key: &Key, range: Option<Range<u64>>) -> driftless_store::Result<Vec<u8>> {
        self.origin.get(key, range)
    }

    fn get_cached(
        &self,
        object: &Object,
        range: Range<u64>,
        arrived: &OnBytes,
    ) -> driftless_store::Result<Vec<u8>> {
        // A relay knows the object by its size, so a byte behind the end tells nothing there.
        let inside = range.start.min(object.size)..range.end.min(object.size);
        if inside.is_empty() {
            return self.origin.get_cached(object, range, arrived);
        }
        for index in self.order(&object.blake3) {
            let Some(peer) = self.relays.get(index).filter(|peer| peer.is_due()) else { continue };
            match self.ask(peer, object, &inside, arrived) {
                Ok(bytes) => {
                    peer.succeeded();
                    let mut given = self.given();
                    if given.len() >= REMEMBERED_MAX && !given.contains_key(&object.blake3) {
                        given.pop_first();
                    }
                    given.entry(object.blake3).or_default().insert(index);
                    return Ok(bytes);
                }
                Err(error) => peer.failed(&object.key, &error),
            }
        }
        self.origin.get_cached(object, range, arrived)
    }

    fn report_corrupt(&self, object: &Object) -> bool {
        let Some(suspects) = self.given().remove(&object.blake3) else {
            return self.origin.report_corrupt(object);
        };
        for peer in suspects.iter().filter_map(|index| self.relays.get(*index)) {
            peer.lied(&object.key);
        }
        true
    }

    fn head(&self, key: &Key) -> driftless_store::Result<Entry> {
        self.origin.head(key)
    }

    fn list(&self, prefix: &Key) -> driftless_store::Result<Vec<Entry>> {
        self.origin.list(prefix)
    }

    fn delete(&self, key: &Key) -> driftless_store::Result<()> {
        self.origin.delete(key)
    }
}
